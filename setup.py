"""What pyproject.toml cannot say: with INFSIM_COMPILED=1 mypyc compiles what a simulation spends its time in.

The sources are the same and so are the numbers. Policies stay Python: your own may inherit from them.
"""

import os

from setuptools import setup

CORE = (
    "basis batching blocks borrower borrowing cost creditor debtor dispatcher gmanager heartbeats journal laws/attention messages "
    "pricing records rmanager steptime view"
)
DRIVER = "chaos driver executor links surroundings transfers"


def extensions() -> list:
    if not os.environ.get("INFSIM_COMPILED"):
        return []
    from mypyc.build import mypycify

    sources = [f"perfmodel/{name}.py" for name in CORE.split()] + [f"infsim/{name}.py" for name in DRIVER.split()]
    return mypycify(sources, opt_level="3")


setup(ext_modules=extensions())
