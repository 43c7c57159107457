"""One module per trace format, named by `traces.catalogue.READERS`.

Each has `read(file, options, account) -> Iterator[Chunk]` (a folder format: `read_folder(path, options, source, account)`): it
yields the rows as they stand, raises `InputError` naming line, column and value, and may add a note to the account. Everything
after that (order, window, limits, rate) is the loader's.
"""
