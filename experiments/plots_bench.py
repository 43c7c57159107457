"""The picture of the attention benchmark, from the profile CSV that `python -m infreal.bench attention --out DIR` writes."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.plotstyle import CYCLE, GREY, MARKERS, log_scale, new_figure, save, styled
from experiments.profile import numbers, read_csv
from perfmodel.errors import InputError

CASE = ("heads", "kv_heads", "rows", "context_tokens")
RIVALS = ("sdpa_contiguous", "sdpa_expanded", "flash_attn", "flashinfer")
Case = tuple[int, ...]
Values = Mapping[Case, float]


@styled
def plot_attention_bench(csv_path: Path, out_dir: Path) -> list[Path]:
    """Writes attention.png and attention.svg: bandwidth against the copy's, time against the best rival's, cost of the merge.

    Raises InputError where the CSV lacks a column or holds no decode attention.
    """
    table = read_csv(csv_path)
    for name in ("operator", "gpu", "dtype", "ranks"):
        if name not in table:
            raise InputError(f"{csv_path}: column {name} is missing")
    ours = table[table["operator"] == "decode_attention"]
    if ours.empty:
        raise InputError(f"{csv_path}: column operator: no row of decode_attention")
    times = values_by_case(ours, "time_s", csv_path)
    figure, [[bandwidth, ratio, merge]] = new_figure(1, 3, width=4.2, height=3.6)
    draw_bandwidth(bandwidth, times, values_by_case(ours, "num_bytes", csv_path), copy_rate(table))
    draw_ratio(ratio, times, values_by_case(table[table["operator"].isin(RIVALS)], "time_s", csv_path))
    draw_merge(merge, times, table[table["operator"] == "merge"], csv_path)
    for axes in (bandwidth, ratio, merge):
        context_axis(axes, sorted({case[-1] for case in times}))
    figure.suptitle(f"Decode MicroAttention on {ours['gpu'].iloc[0]}, {ours['dtype'].iloc[0]}", fontsize=10)
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    out_dir.mkdir(parents=True, exist_ok=True)
    return save(figure, out_dir / "attention")


def values_by_case(frame: pd.DataFrame, name: str, path: Path) -> dict[Case, float]:
    """A column by case; the least where a case occurs more than once."""
    cases = zip(*(numbers(frame, key, path).astype(int).tolist() for key in CASE), strict=True)
    found: dict[Case, float] = {}
    for case, value in zip(cases, numbers(frame, name, path).tolist(), strict=True):
        found[case] = min(value, found.get(case, value))
    return found


def copy_rate(table: pd.DataFrame) -> float | None:
    """Bytes per second of the run's own copy, read plus written."""
    copies = table[table["operator"] == "memory_copy"]
    return None if copies.empty else float((copies["num_bytes"] / copies["time_s"]).max())


def draw_bandwidth(axes: Axes, times: Values, num_bytes: Values, copy_bytes_per_s: float | None) -> None:
    draw_lines(axes, times, {case: num_bytes[case] / time_s / 1e9 for case, time_s in times.items()})
    if copy_bytes_per_s is not None:
        axes.axhline(copy_bytes_per_s / 1e9, color=GREY, linestyle="--", label="copy (read + written)")
    axes.set(title="Bandwidth", ylabel="KV read, GB/s", ylim=(0, None))


def draw_ratio(axes: Axes, times: Values, best: Values) -> None:
    """Time of MicroAttention over that of the fastest rival at hand."""
    draw_lines(axes, times, {case: times[case] / best[case] for case in times if case in best})
    axes.axhline(1.0, color=GREY, linestyle="--")
    axes.set(title="Against the fastest rival", ylabel="time / time of the rival")
    log_scale(axes)


def draw_merge(axes: Axes, times: Values, merges: pd.DataFrame, path: Path) -> None:
    """The merge of the most parts that were measured, as a share of MicroAttention's time."""
    axes.set(title="Merge", ylabel="time, % of MicroAttention's")
    if merges.empty:
        return
    parts = merges["ranks"].max()
    merge_s = values_by_case(merges[merges["ranks"] == parts], "time_s", path)
    draw_lines(axes, times, {case: 100 * merge_s[case] / times[case] for case in times if case in merge_s})
    axes.set_title(f"Merge of {parts:.0f} parts")
    log_scale(axes)


def draw_lines(axes: Axes, cases: Values, values: Values) -> None:
    """A line along the context per heads (colour) and rows (marker), which are the same in every panel."""
    all_heads, all_rows = sorted({case[:2] for case in cases}), sorted({case[2] for case in cases})
    for i, heads in enumerate(all_heads):
        for j, rows in enumerate(all_rows):
            line = sorted((case[3], value) for case, value in values.items() if case[:3] == (*heads, rows))
            label = f"{heads[0]}/{heads[1]} heads, batch {rows}"
            if line:
                contexts, heights = zip(*line, strict=True)
                axes.plot(contexts, heights, label=label, color=CYCLE[i % len(CYCLE)], marker=MARKERS[j % len(MARKERS)])


def context_axis(axes: Axes, contexts: list[int]) -> None:
    axes.set(xlabel="context, tokens", xscale="log", xticks=contexts)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens < 2**20 else "1M"))
