"""`infsim traces`: options only; the work is in traces and experiments.plots_traces."""

import json as json_module
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.errors import InputError

if TYPE_CHECKING:
    from traces import Trace

app = typer.Typer(help="Read, describe, convert and generate workloads.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="the trace (servegen: its folder)", show_default=False)]
FormatName = Annotated[str, typer.Option("--format", metavar="F", help="one of `infsim list traces`")]
Out = Annotated[Path, typer.Option(metavar="OUT", help="NAME.csv, NAME.csv.gz or NAME.parquet")]
Window = Annotated[
    tuple[float, float] | None, typer.Option("--window", metavar="A B", help="keep arrivals in [A, B) s, re-based")
]
Number = Annotated[int | None, typer.Option(help="keep the first N requests", min=1)]
Rate = Annotated[float | None, typer.Option(help="rescale the gaps to this mean rate")]
Jitter = Annotated[bool, typer.Option("--jitter", help="spread arrivals within a coarse clock's step")]
MaxContext = Annotated[int | None, typer.Option(help="limit on input + output tokens")]
OverLong = Annotated[str, typer.Option(help="beyond the limit: error, drop or clip_input")]
KeepFailed = Annotated[bool, typer.Option("--keep-failed", help="keep rows with zero input or output, as one token")]
Seed = Annotated[int, typer.Option(help="seed of everything drawn")]
Tokenizer = Annotated[str | None, typer.Option(metavar="FILE", help="tokenizer.json, for sharegpt")]


@app.command()
def describe(
    context: typer.Context,
    file: File,
    *,
    format_name: FormatName,
    window_s: Window = None,
    num_requests: Number = None,
    rate_rps: Rate = None,
    jitter: Jitter = False,
    max_context_tokens: MaxContext = None,
    over_long: OverLong = "error",
    keep_failed: KeepFailed = False,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the picture goes")] = Path(),
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="write PNG and SVG")] = True,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Counts, rate, percentiles, burstiness and the account of drops; a picture of lengths and arrivals."""
    from traces.describe import describe as describe_trace

    trace = _load(context)
    found = {**describe_trace(trace), "manifest": trace.manifest()}
    typer.echo(json_module.dumps(found, indent=1) if json else "\n".join(_lines(found, trace)))
    if picture:
        from experiments.plots_traces import plot_trace

        stem = _folder(out) / f"{file.name.split('.')[0]}-{format_name}"
        written = plot_trace(trace, f"{file.name} ({format_name}): {len(trace):,} requests", stem)
        typer.echo("picture: " + ", ".join(str(path) for path in written), err=json)


@app.command()
def convert(
    context: typer.Context,
    file: File,
    *,
    format_name: FormatName,
    out: Out,
    window_s: Window = None,
    num_requests: Number = None,
    rate_rps: Rate = None,
    jitter: Jitter = False,
    max_context_tokens: MaxContext = None,
    over_long: OverLong = "error",
    keep_failed: KeepFailed = False,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
) -> None:
    """Writes a trace in the project's own format; replaying it gives the same requests to the last bit."""
    _write(_load(context), out)


@app.command()
def generate(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="one of `infsim list generators`", show_default=False)],
    *,
    out: Out,
    num_requests: Annotated[int, typer.Option(help="how many")] = 1000,
    output: Annotated[str | None, typer.Option(help="chat, balanced, prompt-heavy, share-50")] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma, piecewise, ramp, diurnal, closed, saturated")
    ] = "poisson",
    rate_rps: Annotated[float | None, typer.Option(help="mean rate")] = None,
    cv: Annotated[float, typer.Option(help="coefficient of variation of the gaps")] = 1.0,
    users: Annotated[int | None, typer.Option(help="closed: users")] = None,
    think_s: Annotated[float, typer.Option(help="closed: mean think time")] = 0.0,
    think_cv: Annotated[float, typer.Option(help="closed: its variation; 0 constant, 1 exponential")] = 1.0,
    step: Annotated[
        list[str] | None, typer.Option(metavar="S:SHARE", help="piecewise: from S s on; repeatable")
    ] = None,
    period_s: Annotated[float, typer.Option(help="ramp: its length; diurnal: its period")] = 86_400.0,
    depth: Annotated[float, typer.Option(help="ramp, diurnal: how far below (and above) the rate")] = 0.8,
    max_context_tokens: MaxContext = None,
    over_long: OverLong = "error",
    seed: Seed = 0,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=NUMBER", help="of a parametric one; repeatable")
    ] = None,
) -> None:
    """Draws a workload and writes it in the project's own format."""
    import traces

    profile = tuple(_numbers("step", text, text.split(":")) for text in step) if step else None
    keys = {
        field.name: context.params[field.name]
        for field in fields(traces.GenerateOptions)
        if field.name in context.params
    }
    options = traces.GenerateOptions(**keys, profile=profile, params=dict(_param(text) for text in param or ()))  # type: ignore[arg-type]
    _write(traces.generate(name, options), out)


def _load(context: typer.Context) -> "Trace":
    """The trace that the options of a command ask for: theirs are the names of `LoadOptions`."""
    import traces

    given = context.params
    options = traces.LoadOptions(**{field.name: given[field.name] for field in fields(traces.LoadOptions)})
    return traces.load(given["format_name"], given["file"], options)


def _write(trace: "Trace", out: Path) -> None:
    import traces

    traces.write_own(trace, out)
    typer.echo(f"{trace.account.line()}; written to {out}")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: cannot be created ({error.strerror})") from None
    return path


def _param(text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    return key, _numbers("param", text, [value])[0]


def _numbers(option: str, text: str, parts: list[str]) -> tuple[float, ...]:
    """The parts of an option's value; whole ones as int, since some parameters must be."""
    try:
        return tuple(int(part) if part.isdecimal() else float(part) for part in parts)
    except ValueError:
        raise InputError(f"--{option} {text}: {parts} are not numbers") from None


def _lines(found: dict[str, Any], trace: "Trace") -> list[str]:
    """What `describe` prints for people."""
    columns = ("mean", "sd", "min", "p50", "p90", "p99", "max")
    account = found["manifest"]["account"]
    lines = [
        trace.account.line(),
        *(f"changed: {reason} {count:,}" for reason, count in account["changed"].items()),
        *([f"out of order in the file: {account['inversions']:,} rows (sorted)"] if account["inversions"] else []),
        *(f"note: {note}" for note in account["notes"]),
        f"{found['num_requests']:,} requests in {found['duration_s']:,.1f} s, {_shown(found['rate_rps'])} requests/s",
        f"{'tokens':<8}" + "".join(f"{name:>10}" for name in columns),
    ]
    for side in ("input", "output", "context"):
        numbers = found[f"{side}_tokens"]
        lines.append(f"{side:<8}" + "".join(f"{numbers[name]:>10,.0f}" for name in columns))
    lines.append(f"output share of all tokens: {found['output_share_frac']:.1%}")
    burst = ("gap_cv", "dispersion_60s", "peak_60s_over_mean", "empty_minutes", "longest_gap_s", "same_instant_frac")
    lines.append("arrivals: " + ", ".join(f"{name} {_shown(found[name])}" for name in burst))
    return lines


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
