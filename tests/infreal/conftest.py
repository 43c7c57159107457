"""Without a CUDA device the Triton kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `attention_reference`, shared by the tests of this folder

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported before tests/infreal could set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def threads(number: int):
    """The body of a fixture: so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    """Small products are quickest on one thread, and do not wait for a core that others use."""
    yield from threads(1)


@pytest.fixture
def two_threads():
    yield from threads(2)


@pytest.fixture(scope="session")
def smollm2():
    """(tokenizer, decoder) of SmolLM2-135M; skips where its package is not installed."""
    from infreal.model import ModelError, load_decoder, open_checkpoint

    try:
        checkpoint = open_checkpoint("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    return checkpoint.tokenizer(), load_decoder(checkpoint, torch.float32)


@pytest.fixture(params=["in_process", "gloo", "nccl"])
def network(request: pytest.FixtureRequest):
    """A maker of networks of so many ranks, all in this process, over each carrier."""
    from transport_tools import CARRIERS

    made = []

    def make(num_ranks: int = 2):
        made.append(CARRIERS[request.param](num_ranks))
        return made[-1]

    yield make
    for one in made:
        for rank in range(len(one.endpoints)):
            one.kill(rank)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: a configuration of two small instances."""
    from pool_tools import CONFIG
    from ray_tools import SWEEP

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path
