"""The longest context of one request, for every system and layout of a cluster: admission's formula, before any run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.config import SYSTEMS, Instance
from perfmodel.cluster import largest_blocks
from perfmodel.errors import InputError
from perfmodel.layout import allowed_tensor_parallel, single_layout
from perfmodel.memory import memory_account
from perfmodel.specs import InstanceSpec, ModelSpec

if TYPE_CHECKING:
    from rich.table import Table


def longest_contexts(instance: InstanceSpec, num_gpus: int) -> list[dict[str, Any]]:
    """An entry a system and layout of `num_gpus` GPUs; many instances have the pipeline stages of `instance`.

    0 tokens: the weights leave no room for KV. Headroom is the configuration's default. A system without a layout has no entry;
    raises InputError where none has.
    """
    found = []
    for system, (layout, placement, _) in SYSTEMS.items():
        sizes = many_layouts(instance, num_gpus) if layout == "multi" else whole_layout(instance.model, num_gpus)
        for tensor_parallel, pipeline_parallel in sizes:
            shape = replace(instance, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
            count, num_blocks = num_gpus // shape.num_gpus, memory_account(shape).num_blocks
            largest = largest_blocks(num_blocks, 1 if placement == "none" else count, Instance().headroom_frac)
            entry: dict[str, Any] = {"system": system, "num_instances": count}
            entry |= {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
            entry |= {"pool_tokens": count * num_blocks * shape.block_tokens}
            found.append(entry | {"longest_request_tokens": largest * shape.block_tokens})
    if not found:
        single_layout(instance.model, num_gpus)  # says why
    return found


def many_layouts(instance: InstanceSpec, num_gpus: int) -> Iterator[tuple[int, int]]:
    """(tensor_parallel, pipeline_parallel) that cut the GPUs into two instances or more."""
    stages = instance.pipeline_parallel
    for tensor_parallel in allowed_tensor_parallel(instance.model):
        size = tensor_parallel * stages
        if size < num_gpus and num_gpus % size == 0:
            yield tensor_parallel, stages


def whole_layout(model: ModelSpec, num_gpus: int) -> Iterator[tuple[int, int]]:
    """The layout of one instance of all GPUs, if there is one."""
    with suppress(InputError):
        yield single_layout(model, num_gpus)


def contexts_table(entries: Sequence[Mapping[str, Any]]) -> "Table":
    """`longest_contexts` for a terminal."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("system")
    table.add_column("layout", no_wrap=True)
    for name in ("pool tokens", "longest request"):
        table.add_column(name, justify="right", no_wrap=True)
    before = entries[0]["system"]
    for entry in entries:
        if entry["system"] != before:
            table.add_section()
        stages = f" PP{entry['pipeline_parallel']}" if entry["pipeline_parallel"] > 1 else ""
        layout = f"{entry['num_instances']} × TP{entry['tensor_parallel']}{stages}"
        longest = f"{entry['longest_request_tokens']:,}" if entry["longest_request_tokens"] else "does not fit"
        table.add_row(entry["system"], layout, f"{entry['pool_tokens']:,}", longest)
        before = entry["system"]
    return table
