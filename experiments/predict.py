"""`infsim predict`: the time of an iteration with its parts, an instance's memory, the longest context it holds."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.catalogue import load_engine, load_gpu, load_link, load_model
from experiments.contexts import contexts_table, longest_contexts
from experiments.packs import cost_model
from experiments.sweepfile import parse_yaml
from perfmodel.breakdown import parts, roofline_s
from perfmodel.cost import Batch, CostModel
from perfmodel.curves import ENDS
from perfmodel.errors import InputError
from perfmodel.specs import InstanceSpec

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Named = str | Mapping[str, Any]
INTER_LINK = "ethernet-100g"  # as the configuration's default; only instances beyond one node use it


@dataclass(frozen=True)
class Query:
    """What to predict: an instance, and the batch of one iteration in the command's notation."""

    model: str
    gpu: Named = "a100-80gb"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    link: Named | None = None  # inside a node; None: the GPU's usual one
    engine: Named = "graphs"
    pack: str | None = None
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    cluster: str = "4x8"  # of max_context

    def instance(self) -> InstanceSpec:
        gpu = load_gpu(self.gpu)
        links = load_link(self.link or gpu.link), load_link(INTER_LINK)
        sizes = self.tensor_parallel, self.pipeline_parallel
        _, per_node = parse_cluster(self.cluster)
        model, engine = load_model(self.model), load_engine(self.engine)
        instance = InstanceSpec(model, gpu, engine, *links, *sizes, gpus_per_node=per_node)
        instance.check()
        return instance

    def batch(self) -> Batch:
        rows = [parse_decode(text) for text in self.decode]
        return Batch(
            decode_rows=sum(count for count, _ in rows),
            decode_context_tokens=sum(count * context for count, context in rows),
            longest_context_tokens=max((context for _, context in rows), default=0),
            chunks=tuple(parse_prefill(text) for text in self.prefill),
        )


def parse_decode(text: str) -> tuple[int, int]:
    """ROWSxCONTEXT → (rows, context_tokens)."""
    return _two_numbers("--decode", text, r"(\d+)[xX](\d+)", "ROWSxCONTEXT, both 1 or more, such as 32x2048")


def parse_cluster(text: str) -> tuple[int, int]:
    """NODESxGPUS → (nodes, GPUs of a node)."""
    return _two_numbers("--cluster", text, r"(\d+)[xX](\d+)", "NODESxGPUS, both 1 or more, such as 4x8")


def parse_prefill(text: str) -> tuple[int, int]:
    """TOKENS[@PREFIX] → (tokens, prefix_tokens)."""
    padded = text if "@" in text else f"{text}@0"
    return _two_numbers("--prefill", padded, r"(\d+)@(\d+)", "TOKENS or TOKENS@PREFIX, such as 2048@100000", least=0)


def parse_engine(text: str) -> Named:
    """A name, or a mapping in YAML."""
    engine = parse_yaml(text, "--engine")
    if not isinstance(engine, str | dict):
        raise InputError(f"--engine: {text!r} (allowed: a name, or {{preset: NAME, KEY: VALUE}})")
    return engine


def _two_numbers(option: str, text: str, pattern: str, allowed: str, least: int = 1) -> tuple[int, int]:
    found = re.fullmatch(pattern, text.replace("_", "").replace(",", ""))
    numbers = [int(number) for number in found.groups()] if found else []
    if not numbers or numbers[0] < 1 or numbers[1] < least:
        raise InputError(f"{option}: {text!r} (allowed: {allowed})")
    return numbers[0], numbers[1]


def predict(query: Query, memory: bool = False, max_context: bool = False) -> dict[str, Any]:
    """The dict of `infsim predict --json`.

    total_s, parts (name → s and basis) and roofline_s where a batch is named, band (low_s, high_s) where data sets tell, and
    the paper's rates f and g; memory, where asked for, the account of the fullest GPU; max_context_tokens the longest context
    one request may have on the instance, max_context that of every system and layout of the cluster.
    """
    instance, batch = query.instance(), query.batch()
    if not (batch.tokens or memory or max_context):
        raise InputError("predict: name a batch (--prefill, --decode), --memory or --max-context")
    found: dict[str, Any] = {}
    if batch.tokens:
        cost = cost_model(instance, query.pack)
        found |= price(cost, batch) | {"paper": rates(cost, batch)}
        if cost.curves.bands and not cost.curves.end:
            ends = (CostModel(instance, cost.curves.at_end(end)) for end in ENDS)
            found["band"] = {f"{end.curves.end}_s": price(end, batch)["total_s"] for end in ends}
    if memory:
        found["memory"] = instance.memory_account()
    if max_context:
        found["max_context_tokens"] = instance.num_blocks * instance.block_tokens
        found["max_context"] = longest_contexts(instance, math.prod(parse_cluster(query.cluster)))
    return found


def price(cost: CostModel, batch: Batch) -> dict[str, Any]:
    """total_s, parts, roofline_s of one iteration."""
    priced = parts(cost, batch)
    return {
        "total_s": sum(part.s for part in priced.values()),
        "parts": {name: {"s": part.s, "basis": str(part.basis)} for name, part in priced.items()},
        "roofline_s": roofline_s(cost.instance, batch),
        "source": cost.curves.source,
    }


def rates(cost: CostModel, batch: Batch) -> dict[str, float]:
    """f and g of the paper's §4, per layer and GPU: FLOP/s of the non-attention layers at this batch, KV tokens/s of decode."""
    model, instance = cost.instance.model, cost.instance
    micro = -(-batch.tokens // instance.pipeline_parallel)
    flops = 2.0 * model.layer_matmul_params / instance.tensor_parallel * micro
    found = {"f_flops_per_s": flops / cost.layer_s(micro)}
    if batch.decode_rows:
        s_per_token = cost.decode_attention_terms(batch.decode_rows).s_per_token * instance.pipeline_parallel
        found["g_tokens_per_s"] = model.num_layers / s_per_token
    return found


def render(found: Mapping[str, Any]) -> "Group":
    """The dict of `predict` for a terminal."""
    from rich.console import Group

    shown: list[Table | str] = []
    if "parts" in found:
        shown += [f"one iteration, whole model ({found['source']})", _parts_table(found)]
    if "memory" in found:
        shown += [f"memory of the fullest GPU: {found['memory']['where']}", _memory_table(found["memory"])]
    if "max_context_tokens" in found:
        shown.append(
            f"longest context of one request on this instance: {found['max_context_tokens']:,} tokens; on the cluster:"
        )
        shown.append(contexts_table(found["max_context"]))
    return Group(*shown)


def _parts_table(found: Mapping[str, Any]) -> "Table":
    rows = [(name, f"{part['s'] * 1e3:.3f} ms", part["basis"]) for name, part in found["parts"].items() if part["s"]]
    rows.append(("total", f"{found['total_s'] * 1e3:.3f} ms", ""))
    if "band" in found:
        ends = "–".join(f"{found['band'][f'{end}_s'] * 1e3:.3f}" for end in ENDS)
        rows.append(("data sets disagree", f"{ends} ms", ""))
    rows.append(("roofline at the peaks", f"{found['roofline_s'] * 1e3:.3f} ms", ""))
    rows.append(("f(β), a layer", f"{found['paper']['f_flops_per_s'] * 1e-12:.1f} TFLOP/s", "a GPU"))
    if "g_tokens_per_s" in found["paper"]:
        rows.append(("g(S), a layer", f"{found['paper']['g_tokens_per_s'] * 1e-6:,.0f} M KV tokens/s", "decode"))
    return _table(rows)


def _memory_table(account: Mapping[str, int | str]) -> "Table":
    rows = []
    for name, value in account.items():
        if name.endswith("_bytes"):
            rows.append((name.removesuffix("_bytes"), f"{int(value) / 1e9:,.3f} GB", f"{value:,} bytes"))
        elif name != "where":
            rows.append((name, f"{value:,}", ""))
    return _table(rows)


def _table(rows: Sequence[tuple[str, str, str]]) -> "Table":
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*row)
    return table
