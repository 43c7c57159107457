"""The report: one file, everything in it, and nothing in it that runs or is fetched but its own sorting."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from experiments.report import html_table, runs_of, shown_runs, slowest, with_latencies, write_report
from experiments.runfolder import read_table
from experiments.sweep import Loop, run_sweep
from experiments.sweepfile import load_sweep
from perfmodel.errors import InputError
from perfmodel.metrics import BREAKDOWN

EVIL = '<script>alert("x")</script>'
FIXED = {"generator": "fixed", "params": {"input_tokens": 100, "output_tokens": 10}, "num_requests": 20, "rate_rps": 1}
BASE = {"system": "vllm-multi", "cluster": {"nodes": 1, "gpus_per_node": 2}, "workload": FIXED}
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Which elements a page opens and closes, and where it points."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.addresses = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"


@pytest.fixture(scope="module")
def swept(tmp_path_factory, run_one):
    def with_bad_endings(plan, folder, recording):
        result = run_one(plan, folder, recording)
        result.requests["status"][3], result.requests["reason"][3] = "rejected", EVIL
        result.requests["finish_s"][3] = result.requests["first_token_s"][3] = None
        return result

    out = tmp_path_factory.mktemp(EVIL.replace("/", "")) / "sweep"
    axes = {"workload.rate_rps": [1, 2, 4]}
    return run_sweep(load_sweep({"base": BASE, "axes": axes}), out, Loop(with_bad_endings))


@pytest.fixture(scope="module")
def page(swept):
    return write_report(swept.folder).read_text()


def test_the_page_is_whole_and_points_at_nothing_outside_itself(page):
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.found.count("script") == 1
    assert parsed.addresses and all(address.startswith("data:image/svg+xml;base64,") for address in parsed.addresses)


def test_strings_of_traces_are_escaped(page):
    assert EVIL not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page


def test_a_sweep_shows_its_table_and_every_run(page, swept):
    assert all(page.count(f"<h2>{folder.name}</h2>") == 1 for folder in swept.folders)
    assert "Best by goodput" in page and "How far to trust it" in page and "Configuration" in page
    assert page.count('alt="latencies"') == len(swept.folders)


def test_one_run_has_a_report_too(swept, tmp_path):
    folder = swept.folders[2]
    text = write_report(folder, tmp_path / "one.html").read_text()
    assert f"<h2>{folder.name}</h2>" in text and "Throughput and latency" not in text


def test_the_slowest_are_in_order_and_their_parts_sum_to_the_latency(swept):
    frame = slowest(with_latencies(read_table(swept.folders[0], "requests")))
    assert frame["e2e_s"].is_monotonic_decreasing and len(frame) == 19
    assert frame[list(BREAKDOWN)].sum(axis=1).to_numpy() == pytest.approx(frame["e2e_s"].to_numpy())


def test_at_most_a_few_runs_are_shown_and_those_are_the_best(swept, monkeypatch):
    monkeypatch.setattr("experiments.report.MAX_RUNS", 2)
    rates = [manifest["metrics"]["goodput_rps"] for manifest in swept.manifests]
    shown = shown_runs(swept)
    assert len(shown) == 2
    assert min(rates[i] for i in shown) >= max(rates[i] for i in set(range(3)) - set(shown))


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(InputError, match="holds no runs"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_is_named(swept, tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_report(swept.folders[0], tmp_path / "absent" / "page.html")


def test_numbers_sort_by_their_full_value():
    import pandas as pd

    table = html_table(pd.DataFrame({"x": [1234.5678, float("nan")], "name": ["a", None]}))
    assert '<td data-value="1234.5678">1,235</td>' in table
    assert '<td data-value=""></td>' in table


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read the page's script with")
def test_the_sorting_script_is_javascript(page, tmp_path):
    file = tmp_path / "sort.js"
    file.write_text(re.search(r"<script>(.*?)</script>", page, re.DOTALL).group(1))
    assert subprocess.run(["node", "--check", file], check=False).returncode == 0


PROBE = """<script>
addEventListener("load", () => {
  const table = document.querySelector("table"), heads = [...table.querySelectorAll("th")];
  const at = heads.findIndex(head => head.textContent === "output tok per s");
  const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[at].dataset.value));
  const found = {before: values(), orders: [], width: innerWidth, needed: document.documentElement.scrollWidth};
  for (let i = 0; i < 2; i++) { heads[at].click(); found.orders.push(values()); }
  found.pictures = [...document.images].map(image => image.complete && image.naturalWidth > 0);
  document.body.innerHTML = "";
  document.body.textContent = "found" + JSON.stringify(found) + "found";
});
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium (Debian's package)")
def test_a_browser_renders_it_without_complaint_sorts_it_and_fits_it_on_a_phone(page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"{PROBE}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=390,844"]
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path}/profile", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    found = json.loads(done.stdout.split("found")[1])
    assert found["pictures"] and all(found["pictures"])
    assert found["needed"] <= found["width"] < 600
    ordered = sorted(found["before"])
    assert len(set(ordered)) == 3 and found["orders"] == [ordered[::-1], ordered]


def test_runs_of_takes_a_sweep_or_a_run(swept):
    assert len(runs_of(swept.folder).folders) == 3
    assert runs_of(swept.folders[1]).folders == (swept.folders[1],)
