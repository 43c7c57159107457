"""What is asked of a model in a run: the prompts of a workload, and when an output ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infreal.executor import Text
from perfmodel.cluster import Workload


class Prompts(Protocol):
    """The token ids of a request's prompt."""

    def __call__(self, req_id: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of a workload that holds lengths and no text: the same seed gives the same ids, whatever is asked for first."""

    workload: Workload
    vocab_size: int
    seed: int

    def __call__(self, req_id: int) -> list[int]:
        draw = np.random.default_rng((self.seed, req_id))
        ids: list[int] = draw.integers(self.vocab_size, size=int(self.workload.input_tokens[req_id])).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Requests:
    """stop_ids: an output ends early at any of these; without them it has exactly the length that the workload says."""

    workload: Workload
    prompts: Prompts
    stop_ids: Sequence[int] = ()

    def text(self, req_id: int) -> Text:
        """A request that has generated nothing yet."""
        ids = list(self.prompts(req_id))  # it grows with the output
        assert len(ids) == self.workload.input_tokens[req_id], f"prompt {req_id} has {len(ids)} tokens"
        return Text(ids, len(ids), int(self.workload.output_tokens[req_id]), self.stop_ids)
