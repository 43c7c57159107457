"""`python -m infsim.bench.compiled build --build-lib DIR`: the packages, what a simulation spends its time in compiled by mypyc.

The sources are the same and so are the numbers. Policies stay Python: your own may inherit from them. Run where pyproject.toml is.
"""

from mypyc.build import mypycify
from setuptools import setup  # type: ignore[import-untyped]

CORE = (
    "basis batching blocks borrower borrowing cost creditor debtor dispatcher gmanager heartbeats journal laws/attention messages "
    "pricing records rmanager steptime view"
)
DRIVER = "chaos driver executor given links surroundings transfers"


def main() -> None:
    sources = [f"perfmodel/{name}.py" for name in CORE.split()] + [f"infsim/{name}.py" for name in DRIVER.split()]
    setup(ext_modules=mypycify(sources, opt_level="3"))


if __name__ == "__main__":
    main()
