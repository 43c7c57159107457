"""The figures' scripts, which are not a package, and each of them made once at its smallest size."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "paper_figures"
sys.path.insert(0, str(FOLDER))


@pytest.fixture(scope="session")
def script():
    """A script by its file's name."""
    return importlib.import_module


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    from study import Study

    return Study(tmp_path_factory.mktemp("figures"), "tiny")


@pytest.fixture(scope="session")
def made(study, script):
    """`made("fig01b_memory")` → its page entry and its plotted numbers."""
    import pandas as pd
    from sheet import make

    entries = {}

    def make_once(name):
        if name not in entries:
            entries[name] = make(script(name), study)
        return entries[name], pd.read_csv(study.out / f"{name}.csv")

    return make_once
