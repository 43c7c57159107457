"""`infsim list`: a line for everything that can be named."""

import pytest

from experiments.config import SECTIONS
from experiments.listing import KINDS, listing
from perfmodel.errors import InputError


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_lines_of_one_line(kind):
    lines = listing(kind)
    assert lines
    assert all(name and text and "\n" not in text for name, text in lines)


def test_keys_come_from_the_models():
    keys = dict(listing("keys"))
    assert keys["instance.token_budget"] == "integer, default 2048: most tokens of an iteration, decode rows first"
    assert keys["layout"].startswith("multi | single | null, default null: ")
    assert keys["workload.path [trace]"].startswith("text, required: ")
    assert keys["gpu"].startswith("text | mapping, default a100-80gb: ")
    assert keys["macro"].startswith("boolean, default true: ")
    leaves = sum(len(model.model_fields) for model in SECTIONS.values()) - len(SECTIONS) + 2
    assert len(listing("keys")) == leaves


def test_an_unknown_kind_is_named():
    with pytest.raises(InputError, match="unknown kind 'model'; did you mean 'models'"):
        listing("model")
