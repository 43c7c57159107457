"""`infsim report`: a sweep or a run as one HTML file that needs no network, no server and no other file.

Every string that comes from a trace, a configuration or a reason is escaped; pictures are SVG in data addresses.
"""

import base64
import io
import json
from collections.abc import Iterable
from html import escape
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from experiments.plots import ledger_picture, throughput_latency
from experiments.plotstyle import styled
from experiments.points import BASES, points_of
from experiments.report_pictures import instances_picture, latencies_picture
from experiments.runfolder import read_manifest, read_table, summary_row
from experiments.runs import Runs, load_runs
from experiments.summary import closing_lines, number
from perfmodel.errors import InputError
from perfmodel.metrics import BREAKDOWN, shares

TEMPLATE = Path(__file__).parent / "data" / "report.html"
MAX_RUNS = 8  # shown one by one: every picture is some 50 KB
SLOWEST = 20
HIDDEN = ("wall_s", "window_kind", "num_requests")  # of the summary's columns


def write_report(folder: Path, file: Path | None = None) -> Path:
    """The report of a sweep's folder, or of one run in it; `file` None: report.html there. Raises InputError."""
    runs = runs_of(folder)
    path = file or folder / "report.html"
    try:
        path.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def runs_of(folder: Path) -> Runs:
    """A sweep's folder, or a run's."""
    manifest = read_manifest(folder)
    return load_runs(folder) if manifest is None else Runs(folder, (folder,), (manifest,))


def render(runs: Runs) -> str:
    """The page."""
    name = runs.folder.resolve().name
    body = [f"<h1>{escape(name)}</h1>", *paragraphs(closing_lines(runs.manifests))]
    body += ["<h2>Runs</h2>", summary_table(runs)]
    points = points_of(runs.manifests)
    if len(points) > 1:
        body += ["<h2>Throughput and latency</h2>", picture(throughput_latency(points), "throughput and latency")]
    shown = shown_runs(runs)
    if len(shown) < len(runs.folders):
        body += paragraphs(
            [f"{len(shown)} of {len(runs.folders)} runs follow one by one: those of the highest goodput."]
        )
    for i in shown:
        body += run_section(runs.folders[i], runs.manifests[i])
    body += provenance_section(runs)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=escape(name), body="\n".join(body))


def shown_runs(runs: Runs) -> list[int]:
    """Positions of the runs to show one by one, in order: at most `MAX_RUNS`, the best by goodput."""
    done = [i for i, manifest in enumerate(runs.manifests) if manifest["status"] == "done"]
    done.sort(key=lambda i: -(runs.manifests[i]["metrics"]["goodput_rps"] or 0.0))
    return sorted(done[:MAX_RUNS])


def run_section(folder: Path, manifest: Any) -> list[str]:
    """One run: memory and batches over time, the ledger, moves, latencies, the slowest requests, and its configuration."""
    requests, instances, moves = (read_table(folder, name) for name in ("requests", "instances", "moves"))
    requests = with_latencies(requests)
    body = [f"<h2>{escape(folder.name)}</h2>", picture(instances_picture(instances), "KV memory and batch over time")]
    if len(moves):
        body += ["<h3>Who lends to whom</h3>", picture(ledger_picture(instances, moves, folder.name), "lending ledger")]
        body += [html_table(moves_table(moves))]
    if (requests["status"] == "finished").any():
        body += ["<h3>Latency by length of the context</h3>", picture(latencies_picture(requests), "latencies")]
        body += [
            f"<h3>The {SLOWEST} slowest requests, and where their time went (s)</h3>",
            html_table(slowest(requests)),
        ]
    missed = requests[requests["status"] != "finished"]
    if len(missed):
        reasons = missed.groupby(["status", "reason"], dropna=False).size().rename("requests").reset_index()
        body += ["<h3>Requests that did not finish</h3>", html_table(reasons)]
    config = json.dumps(manifest["config"], indent=2, ensure_ascii=False)
    return [*body, f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"]


def with_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """ttft_s, tpot_s (undefined for one token) and e2e_s beside the columns of requests.parquet."""
    gaps = (requests["output_tokens"] - 1).where(requests["output_tokens"] > 1)
    return requests.assign(
        ttft_s=requests["first_token_s"] - requests["arrival_s"],
        tpot_s=(requests["finish_s"] - requests["first_token_s"]) / gaps,
        e2e_s=requests["finish_s"] - requests["arrival_s"],
    )


def slowest(requests: pd.DataFrame) -> pd.DataFrame:
    """The finished requests with the highest latency; its parts sum to it."""
    columns = ["req_id", "instance", "arrival_s", "input_tokens", "output_tokens", "e2e_s", "ttft_s", *BREAKDOWN]
    done = requests[requests["status"] == "finished"]
    return done.nlargest(SLOWEST, "e2e_s")[[*columns, "num_preemptions", "remote_tokens_max"]]


def moves_table(moves: pd.DataFrame) -> pd.DataFrame:
    """Moves by kind and outcome."""
    groups = moves.groupby(["kind", "outcome"], dropna=False)
    found = groups.agg(moves=("move_id", "size"), blocks=("num_blocks", "sum"), gigabytes=("num_bytes", "sum"))
    return found.assign(gigabytes=found["gigabytes"] / 1e9).reset_index()


def provenance_section(runs: Runs) -> list[str]:
    """How the simulated times are known, from what, and with which software."""
    rows = [
        {"run": folder.name, "pack": m["provenance"]["truth"]["pack"]}
        | {f"{basis} %": 100 * share for basis, share in shares(m["basis_s"], BASES).items()}
        for folder, m in zip(runs.folders, runs.manifests, strict=True)
        if m["status"] == "done"
    ]
    versions = ", ".join(f"{name} {version}" for name, version in runs.manifests[0]["versions"].items())
    return ["<h2>How far to trust it</h2>", html_table(pd.DataFrame(rows)), *paragraphs([f"Made with {versions}."])]


def summary_table(runs: Runs) -> str:
    """A row a run; a failed one says why."""
    rows = [
        {"run": folder.name, **summary_row(manifest)} | ({} if "metrics" in manifest else {"error": manifest["error"]})
        for folder, manifest in zip(runs.folders, runs.manifests, strict=True)
    ]
    frame = pd.DataFrame(rows).drop(columns=list(HIDDEN))
    return html_table(frame.dropna(axis="columns", how="all"))


# --- HTML --------------------------------------------------------------------------------------------------------------


def paragraphs(lines: Iterable[str]) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in lines]


def html_table(frame: pd.DataFrame) -> str:
    """Sortable; numbers keep their full value beside the rounded one."""
    names = [str(name) for name in frame.columns]
    head = "".join(f"<th{text_class(frame[name])}>{escape(name.replace('_', ' '))}</th>" for name in frame.columns)
    kinds = [text_class(frame[name]) for name in frame.columns]
    rows = ("".join(map(cell, row, kinds)) for row in frame.itertuples(index=False, name=None))
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    assert len(set(names)) == len(names), "columns have different names"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def text_class(column: "pd.Series[Any]") -> str:
    return "" if column.dtype.kind in "ifb" else ' class="text"'


def cell(value: Any, kind: str) -> str:
    if isinstance(value, str):
        return f"<td{kind}>{escape(value)}</td>"
    if value is None or not isfinite(value):
        return f'<td{kind} data-value=""></td>'
    return f'<td{kind} data-value="{value!r}">{number(float(value))}</td>'


@styled
def picture(figure: Figure, what: str) -> str:
    """SVG in a data address: nothing in it can run or be fetched."""
    for mesh in figure.findobj(QuadMesh):  # a picture in the picture: as paths they would be megabytes
        mesh.set_rasterized(True)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(what)}" src="data:image/svg+xml;base64,{data}">'
