"""The README's numbers and picture are those that its commands print and draw."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PICTURE = ROOT / "experiments" / "configs" / "demo.svg"
BLOCK = re.compile(r"(?<=<!-- printed by: infsim )(.*?)( -->\n```\n)(.*?)(?=\n```)", re.DOTALL)


@pytest.mark.slow
def test_the_demo_prints_and_draws_what_the_readme_shows(tmp_path):
    """`make readme` sets UPDATE_README, which writes the new output in place of comparing it."""
    command, between, shown = BLOCK.search(README).groups()
    done = subprocess.run(
        [sys.executable, "-m", "infsim", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    printed = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    drawn = (tmp_path / "out" / "demo" / "throughput-latency.svg").read_bytes()
    if os.environ.get("UPDATE_README"):
        (ROOT / "README.md").write_text(BLOCK.sub(lambda _: command + between + printed, README), encoding="utf-8")
        PICTURE.write_bytes(drawn)
    else:
        assert printed.splitlines() == shown.splitlines()
        assert drawn == PICTURE.read_bytes()


def test_every_command_of_the_readme_exists():
    listed = set(re.findall(r"`infsim (\w+)", README))
    shown = subprocess.run(
        [sys.executable, "-m", "infsim", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {"run", "capacity", "compare", "predict", "replay", "list", "traces"} <= listed
    assert not [name for name in listed if name not in shown]


def test_every_file_that_the_readme_links_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]
