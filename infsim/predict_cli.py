"""`infsim predict`: options only; the work is in experiments.predict."""

import json as json_module
from typing import Annotated

import typer


def predict(
    *,
    model: Annotated[str, typer.Option(help="a catalogue name, or the path of a Hugging Face config.json")],
    gpu: Annotated[str, typer.Option(help="a catalogue name")],
    tp: Annotated[int, typer.Option("--tp", help="tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="pipeline parallel size")] = 1,
    link: Annotated[str | None, typer.Option(help="link inside a node (default: the GPU's usual one)")] = None,
    engine: Annotated[
        str, typer.Option(help="graphs, eager-2023, or a mapping: '{preset: graphs, splits_all_heads: true}'")
    ] = "graphs",
    pack: Annotated[str | None, typer.Option(help="profile pack (default: the GPU's own)")] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="TOKENS[@PREFIX]", help="a prompt chunk; repeatable")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(metavar="ROWSxCONTEXT", help="decode rows; repeatable")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="print the account of a GPU's memory")] = False,
    max_context: Annotated[
        bool, typer.Option("--max-context", help="print the longest context of one request, by system and layout")
    ] = False,
    cluster: Annotated[
        str, typer.Option(metavar="NODESxGPUS", help="the GPUs of --max-context, and how many a node has")
    ] = "4x8",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Time of one iteration with its parts; times are of the whole model."""
    from experiments.predict import Query, parse_engine, render
    from experiments.predict import predict as predict_query

    query = Query(model, gpu, tp, pp, link, parse_engine(engine), pack, prefill or (), decode or (), cluster)
    found = predict_query(query, memory, max_context)
    if json:
        typer.echo(json_module.dumps(found, indent=1))
        return
    from rich.console import Console

    Console().print(render(found))
