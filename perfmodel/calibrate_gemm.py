"""Fits a `TileGemm` to measured matrix products."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.basis import Domain
from perfmodel.calibrate import FitError, Floats, Prior, fit, fit_error
from perfmodel.errors import InputError
from perfmodel.laws.gemm import K_STEP, Tile, TileGemm, smooth_max
from perfmodel.specs import GpuSpec

# Tiles of the output that cuBLAS's kernels use, and how far k is split. Which of them a GPU favours is left to the fit.
TILES = ((16, 64), (32, 64), (64, 64), (64, 128), (96, 128), (128, 128), (128, 192), (128, 256))
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
LEAST_ROWS = 20
MOST_ROWS = 6_000  # more are thinned out evenly: the fit gains nothing from them


@dataclass(frozen=True)
class GemmRows:
    """Measured products: [m, k] × [k, n], seconds."""

    m: Floats
    n: Floats
    k: Floats
    time_s: Floats
    dtype_bytes: int = 2

    def __len__(self) -> int:
        return len(self.m)

    def pick(self, keep: NDArray[Any]) -> "GemmRows":
        """Some of the rows: a mask or indices."""
        return GemmRows(self.m[keep], self.n[keep], self.k[keep], self.time_s[keep], self.dtype_bytes)


Parts = tuple[Floats, Floats, Floats, Floats, Floats]


def fit_gemm(rows: GemmRows, gpu: GpuSpec) -> tuple[TileGemm, FitError]:
    """The law and its error over the rows. Raises InputError for too few of them."""
    if len(rows) < LEAST_ROWS:
        raise InputError(f"gemm: {len(rows)} rows (allowed: {LEAST_ROWS} or more)")
    step = -(-len(rows) // MOST_ROWS)
    design = Design(rows.pick(np.arange(0, len(rows), step)), gpu)
    values = fit(design.prior, design.time_s, design.rows.time_s, design.slopes)
    law = design.law(values, domain_of(rows))
    return law, fit_error(gemm_s(law, rows), rows.time_s)


def gemm_s(law: TileGemm, rows: GemmRows) -> Floats:
    """What a law says of the rows."""
    times = np.empty(len(rows))
    shapes, which = np.unique(np.stack([rows.n, rows.k]), axis=1, return_inverse=True)
    for i, (n, k) in enumerate(shapes.T):
        here = which.ravel() == i
        times[here] = law.times_s(rows.m[here], int(n), int(k))
    return times


def domain_of(rows: GemmRows) -> Domain:
    sizes = {"m": rows.m, "n": rows.n, "k": rows.k}
    ranges = {name: (float(values.min()), float(values.max())) for name, values in sizes.items()}
    points = {name: tuple(float(v) for v in np.unique(values)) for name, values in sizes.items()}
    few = all(len(values) <= 100 for values in points.values())
    return Domain(ranges, points if few else {})


class Design:
    """The rows seen by every kernel: waves and steps along k, [kernels, rows]; parameters in, times and slopes out."""

    def __init__(self, rows: GemmRows, gpu: GpuSpec) -> None:
        self.rows, self.gpu = rows, gpu
        kernels = [(i, split) for i in range(len(TILES)) for split in SPLITS]
        self._tile = np.array([i for i, _ in kernels])
        self._split = np.array([split for _, split in kernels], float)
        tile_rows, tile_columns = (np.array(TILES)[self._tile, side][:, None] for side in (0, 1))
        blocks = np.ceil(rows.m / tile_rows) * np.ceil(rows.n / tile_columns) * self._split[:, None]
        self._waves = np.ceil(blocks / gpu.num_sms)
        self._steps = np.ceil(rows.k / self._split[:, None] / K_STEP) * K_STEP
        self._bytes = rows.dtype_bytes * (rows.n * rows.k + rows.m * (rows.n + rows.k))
        self._sums_bytes = (self._split > 1)[:, None] * self._split[:, None] * (4.0 * rows.m * rows.n)
        peak = gpu.flops_per_s(rows.dtype_bytes)
        self._roof_s = np.maximum(self._bytes / gpu.memory_bytes_per_s, 2.0 * rows.m * rows.n * rows.k / peak)
        self._kept: tuple[Floats, Parts] = np.zeros(0), (np.zeros(0),) * 5
        ideal_s = [2.0 * a * b / (peak / gpu.num_sms) for a, b in TILES]
        self.prior = Prior.of(
            launch_s=(2e-6, 1.0),
            bytes_per_s=(0.75 * gpu.memory_bytes_per_s, 0.3),
            split_s=(1e-6, 1.0),
            split_bytes_per_s=(gpu.memory_bytes_per_s, 1.5),
            wave_s=([1e-6] * len(TILES), 1.0),
            s_per_k=([ideal / 0.6 for ideal in ideal_s], 0.5),
        )

    def _parts(self, values: Floats) -> Parts:
        """Of the best kernel of each row: its index, compute, mixed and whole time without launch; and memory time.

        Times and slopes are asked for at the same values: the last answer is kept.
        """
        if np.array_equal(values, self._kept[0]):
            return self._kept[1]
        _, bytes_per_s, split_s, split_bytes_per_s = values[:4]
        wave_s, s_per_k = (self.prior.take(values, name)[self._tile][:, None] for name in ("wave_s", "s_per_k"))
        memory_s = self._bytes / bytes_per_s
        compute_s = self._waves * (wave_s + self._steps * s_per_k)
        mixed_s = smooth_max(compute_s, memory_s[None, :])
        reduce_s = (self._split > 1)[:, None] * split_s + self._sums_bytes / split_bytes_per_s
        whole_s = mixed_s + reduce_s
        best = np.argmin(whole_s, axis=0)
        at = best, np.arange(len(self.rows))
        self._kept = values.copy(), (best, compute_s[at], mixed_s[at], whole_s[at], memory_s)
        return self._kept[1]

    def time_s(self, values: Floats) -> Floats:
        whole_s = values[0] + self._parts(values)[3]
        bounded_s: Floats = np.maximum(whole_s, self._roof_s)
        return bounded_s

    def slopes(self, values: Floats) -> Floats:
        """∂ log time / ∂ log parameter: only the best kernel's parameters move a row."""
        best, compute_s, mixed_s, kernel_s, memory_s = self._parts(values)
        every, tile, split = np.arange(len(self.rows)), self._tile[best], self._split[best]
        pull = (compute_s / mixed_s) ** 3
        wave_s = self._waves[best, every] * self.prior.take(values, "wave_s")[tile]
        slopes = np.zeros((len(self.rows), len(values)))
        slopes[:, 0] = values[0]
        slopes[:, 1] = -((memory_s / mixed_s) ** 3) * memory_s
        slopes[:, 2] = np.where(split > 1, values[2], 0.0)
        slopes[:, 3] = -self._sums_bytes[best, every] / values[3]
        slopes[every, 4 + tile] = pull * wave_s
        slopes[every, 4 + len(TILES) + tile] = pull * (compute_s - wave_s)
        whole_s = values[0] + kernel_s
        slopes /= whole_s[:, None]
        slopes[whole_s < self._roof_s] = 0.0
        return slopes

    def law(self, values: Floats, domain: Domain) -> TileGemm:
        wave_s, s_per_k = self.prior.take(values, "wave_s"), self.prior.take(values, "s_per_k")
        used = np.unique(self._tile[self._parts(values)[0]])
        return TileGemm(
            launch_s=float(values[0]),
            bytes_per_s=float(values[1]),
            split_s=float(values[2]),
            split_bytes_per_s=float(values[3]),
            tiles=tuple(Tile(*TILES[i], float(wave_s[i]), float(s_per_k[i])) for i in used),
            splits=SPLITS,
            num_sms=self.gpu.num_sms,
            dtype_bytes=self.rows.dtype_bytes,
            peak_bytes_per_s=self.gpu.memory_bytes_per_s,
            peak_flops_per_s=self.gpu.flops_per_s(self.rows.dtype_bytes),
            domain=domain,
        )
