"""Element-wise kernels (norms, RoPE, activation, copies): bounded by bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Basis, Domain, basis_in


@dataclass(frozen=True)
class StreamLaw:
    """launch_s + the larger of one token's bytes through one thread block and all bytes through the memory."""

    launch_s: float
    bytes_per_s: float
    token_bytes_per_s: float = float("inf")  # rate of a single thread block
    domain: Domain | None = None

    def times_s(self, tokens: NDArray[np.float64], bytes_per_token: float) -> NDArray[np.float64]:
        alone_s = bytes_per_token / self.token_bytes_per_s
        return self.launch_s + np.maximum(alone_s, tokens * bytes_per_token / self.bytes_per_s)

    def bulk_s(self, num_bytes: float) -> float:
        """Many independent bytes, such as KV blocks."""
        return self.launch_s + num_bytes / self.bytes_per_s

    def basis(self, tokens: float) -> Basis:
        return basis_in(self.domain, tokens=tokens)
