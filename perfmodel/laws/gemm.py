"""Matrix products: [m, k] activations × [k, n] weights."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Basis, Domain, basis_in

Floats = NDArray[np.float64]
K_STEP = 32  # a kernel walks k in steps of this


class GemmLaw(Protocol):
    """Seconds of a product, for many m at once."""

    def times_s(self, m: Floats, n: int, k: int) -> Floats: ...

    def basis(self, m: int, n: int, k: int) -> Basis: ...


@dataclass(frozen=True)
class RooflineGemm:
    """launch_s + max(bytes / bytes_per_s, FLOPs / flops_per_s): nothing measured."""

    launch_s: float
    bytes_per_s: float
    flops_per_s: float
    dtype_bytes: int

    def times_s(self, m: Floats, n: int, k: int) -> Floats:
        num_bytes = self.dtype_bytes * (n * k + m * (n + k))
        busy_s: Floats = np.maximum(num_bytes / self.bytes_per_s, 2.0 * m * n * k / self.flops_per_s)
        return self.launch_s + busy_s

    def basis(self, m: int, n: int, k: int) -> Basis:
        return Basis.ANALYTIC


@dataclass(frozen=True)
class Tile:
    """One kernel: the tile of the output a thread block computes, what a wave of blocks costs, and each step along k."""

    rows: int
    columns: int
    wave_s: float
    s_per_k: float


@dataclass(frozen=True)
class TileGemm:
    """Tile and wave quantisation: the best of a few kernels.

    A kernel cuts the output into tiles, k into `splits`, and needs ⌈blocks / num_sms⌉ waves; its compute time and the time
    of the bytes overlap (`smooth_max`), splits pay for adding their fp32 results up. The library picks the best kernel.
    Bounded below by the peaks. Monotone in m, n and k, as every kernel is.
    """

    launch_s: float
    bytes_per_s: float
    split_s: float
    split_bytes_per_s: float
    tiles: tuple[Tile, ...]
    splits: tuple[int, ...]
    num_sms: int
    dtype_bytes: int
    peak_bytes_per_s: float
    peak_flops_per_s: float
    domain: Domain | None = None

    def times_s(self, m: Floats, n: int, k: int) -> Floats:
        num_bytes = self.dtype_bytes * (n * k + m * (n + k))
        memory_s = num_bytes / self.bytes_per_s
        best_s = np.min([self._kernel_s(m, n, k, tile, memory_s) for tile in self.tiles], axis=0)
        roof_s = np.maximum(num_bytes / self.peak_bytes_per_s, 2.0 * m * n * k / self.peak_flops_per_s)
        time_s: Floats = np.maximum(self.launch_s + best_s, roof_s)
        return time_s

    def _kernel_s(self, m: Floats, n: int, k: int, tile: Tile, memory_s: Floats) -> Floats:
        """The best split of k for one tile."""
        splits = np.array(self.splits)[:, None]
        blocks = np.ceil(m / tile.rows) * -(-n // tile.columns) * splits
        steps = np.ceil(k / splits / K_STEP) * K_STEP
        compute_s = np.ceil(blocks / self.num_sms) * (tile.wave_s + steps * tile.s_per_k)
        mixed_s = smooth_max(compute_s, memory_s)
        reduce_s = self.split_s + splits * (4.0 * m * n) / self.split_bytes_per_s
        best_s: Floats = np.min(mixed_s + np.where(splits > 1, reduce_s, 0.0), axis=0)
        return best_s

    def basis(self, m: int, n: int, k: int) -> Basis:
        return basis_in(self.domain, m=m, n=n, k=k)


def smooth_max(a: Floats, b: Floats) -> Floats:
    """(a⁴ + b⁴)^¼: the larger of two times that overlap, a little more where they are close."""
    a2, b2 = a * a, b * b
    mixed: Floats = np.sqrt(np.sqrt(a2 * a2 + b2 * b2))
    return mixed
