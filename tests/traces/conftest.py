"""Small trace files written on the spot, and the real ones where a copy of the shared data lies beside the project."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "../shared/data/traces"


@pytest.fixture
def write(tmp_path):
    """Writes text or bytes to a file and returns its path."""

    def write_file(content, name="trace.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write_file


@pytest.fixture(scope="session")
def real():
    """Path of a real trace; skips where it is not there."""

    def find(name):
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"shared data is not here: {name}")
        return path

    return find


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory):
    """A tokenizer.json that counts words and punctuation marks; skips where the library is not installed."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = tokenizers.Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
