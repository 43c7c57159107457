"""The benchmark's tables, from the rows of a profile alone."""

from collections.abc import Iterable, Sequence

from infreal.bench.profile import ProfileRow
from infreal.rivals import WireShape, dist_attention_bytes, ring_attention_bytes

LARGE_KV_BYTES = 512 << 20  # below this a GPU's decode is bound by launches and latencies, not by memory
RIVAL_NAMES = ("sdpa_contiguous", "sdpa_expanded", "flash_attn", "flashinfer")
WIRE_NAMES = ("dist_attention", "tensor_parallel_attention", "ring_attention")
WIRE_13B = WireShape(rows=1, heads=40, kv_heads=40, head_dim=128, element_bytes=2)
WIRE_RANKS = 4
WIRE_CONTEXTS = (4096, 32_768, 131_072, 262_144)


def report(rows: Sequence[ProfileRow]) -> str:
    first = rows[0]
    title = f"{first.gpu} · {first.software} · {first.dtype}"
    sections = [title, decode_table(rows), merge_table(rows), wire_table(rows), wire_bytes_table()]
    return "\n\n".join(section for section in sections if section)


def copy_bytes_per_s(rows: Sequence[ProfileRow]) -> float:
    copy = next(row for row in rows if row.operator == "memory_copy")
    return copy.num_bytes / copy.time_s


def case_of(row: ProfileRow) -> tuple:
    return row.heads, row.kv_heads, row.head_dim, row.rows, row.context_tokens


def by_case(rows: Iterable[ProfileRow], names: Iterable[str]) -> dict[tuple, dict[str, ProfileRow]]:
    """Rows of these operators, by case, then by operator."""
    names, cases = set(names), {}
    for row in rows:
        if row.operator in names:
            cases.setdefault(case_of(row), {})[row.operator] = row
    return dict(sorted(cases.items()))


def decode_table(rows: Sequence[ProfileRow]) -> str:
    """Ours over scattered and consecutive blocks, share of the copy's bandwidth, and the best rival: ours / rival."""
    copy = copy_bytes_per_s(rows)
    lines = [
        [
            "heads",
            "rows",
            "context",
            "KV MB",
            "ms",
            "GB/s",
            "of copy",
            "runs ms",
            "best rival",
            "ms",
            "ratio",
            "runs ratio",
            "",
        ]
    ]
    for case, found in by_case(rows, ("decode_attention", "decode_attention_run", *RIVAL_NAMES)).items():
        mine, run = found["decode_attention"], found["decode_attention_run"]
        rate = mine.num_bytes / mine.time_s
        best = min((found[name] for name in RIVAL_NAMES if name in found), key=lambda row: row.time_s, default=None)
        cells = [
            *_case_cells(case),
            f"{mine.num_bytes / 1e6:,.0f}",
            _ms(mine.time_s),
            f"{rate / 1e9:,.1f}",
            f"{rate / copy:.0%}",
        ]
        cells += [_ms(run.time_s), *(_rival_cells(mine, run, best) if best else [""] * 4)]
        lines.append([*cells, "" if mine.num_bytes >= LARGE_KV_BYTES else "small"])
    head = f"decode MicroAttention over scattered blocks, and in runs of consecutive ones; copy {copy / 1e9:,.1f} GB/s"
    return f"{head} (read and written)\n{_table(lines)}"


def _case_cells(case: tuple) -> list[str]:
    heads, kv_heads, _, rows, context_tokens = case
    return [f"{heads}/{kv_heads}", f"{rows}", f"{context_tokens:,}"]


def _rival_cells(mine: ProfileRow, run: ProfileRow, best: ProfileRow) -> list[str]:
    return [best.operator, _ms(best.time_s), f"{mine.time_s / best.time_s:.2f}", f"{run.time_s / best.time_s:.2f}"]


def merge_table(rows: Sequence[ProfileRow]) -> str:
    """The merge's time and FLOPs as shares of MicroAttention's, by number of parts."""
    attention = by_case(rows, ("decode_attention",))
    in_parts = {(case_of(row), row.ranks): row for row in rows if row.operator == "decode_attention_in_parts"}
    lines = [["heads", "rows", "context", "parts", "merge µs", "of MA time", "of MA FLOPs", "all parts / one"]]
    for row in (row for row in rows if row.operator == "merge"):
        whole_s = attention[case_of(row)]["decode_attention"].time_s
        parts = in_parts.get((case_of(row), row.ranks))
        cells = [*_case_cells(case_of(row)), f"{row.ranks}", f"{row.time_s * 1e6:,.1f}", f"{row.time_s / whole_s:.2%}"]
        lines.append([*cells, f"{merge_flops_frac(row):.3%}", f"{parts.time_s / whole_s:.2f}" if parts else ""])
    return f"merge of parts\n{_table(lines)}" if len(lines) > 1 else ""


def merge_flops_frac(row: ProfileRow) -> float:
    """FLOPs of a merge over those of MicroAttention, per (row, head).

    Merge, a part: D multiply-adds on acc, one on e, one exponential. Attention, a token: 2 D multiply-adds, one exponential.
    """
    per_part, per_token = 2 * row.head_dim + 3, 4 * row.head_dim + 1
    return row.ranks * per_part / (row.context_tokens * per_token)


def wire_table(rows: Sequence[ProfileRow]) -> str:
    """Measured in one process: the time of all ranks on this device, and what they sent."""
    lines = [["context", "ranks", "contender", "ms in one process", "bytes on the wire", "of DistAttention's"]]
    for (*_, context), found in by_case(rows, WIRE_NAMES).items():
        base_bytes = found["dist_attention"].num_bytes
        for name in WIRE_NAMES:
            row = found[name]
            cells = [f"{context:,}", f"{row.ranks}", name, _ms(row.time_s), f"{row.num_bytes:,}"]
            lines.append([*cells, f"{row.num_bytes / base_bytes:,.1f}"])
    return f"over the transport, LLaMA2-13B heads, one request\n{_table(lines)}" if len(lines) > 1 else ""


def wire_bytes_table() -> str:
    """Computed, not measured: one decode row and layer of LLaMA2-13B in fp16 over four ranks."""
    query, creditors = WIRE_13B.query_bytes(), WIRE_RANKS - 1
    dist = dist_attention_bytes(WIRE_13B, creditors)
    lines = [["context", "DistAttention bytes", "Ring bytes", "Ring / DistAttention"]]
    for context in WIRE_CONTEXTS:
        ring = ring_attention_bytes(WIRE_13B, context, WIRE_RANKS)
        lines.append([f"{context:,}", f"{dist:,}", f"{ring:,}", f"{ring / dist:,.0f}"])
    head = f"bytes at home for one decode row and layer, LLaMA2-13B, fp16, {WIRE_RANKS} ranks"
    return f"{head}: to each creditor {query:,} out, {dist // creditors - query:,} back\n{_table(lines)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(cells, widths) for cells in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
