"""The runs of a sweep's folder as DataFrames."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.runfolder import read_manifest, read_table, run_folders, summary_row
from perfmodel.errors import InputError


@dataclass(frozen=True)
class Runs:
    """`summary` has a row a run; `requests`, `instances` and `moves` those of all runs. Axis columns are joined in."""

    folder: Path
    folders: tuple[Path, ...]
    manifests: tuple[Mapping[str, Any], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.manifests[0]["axes"])

    @cached_property
    def summary(self) -> pd.DataFrame:
        return pd.DataFrame([summary_row(manifest) for manifest in self.manifests])

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self.table("requests")

    @cached_property
    def instances(self) -> pd.DataFrame:
        return self.table("instances")

    @cached_property
    def moves(self) -> pd.DataFrame:
        return self.table("moves")

    def table(self, name: str) -> pd.DataFrame:
        """A table over all runs that are done, the axes and the replicate in front (as `axis.KEY` where names meet)."""
        frames = []
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            if manifest["status"] == "done":
                row = summary_row(manifest)
                frame: pd.DataFrame = read_table(folder, name)
                keys = {key: row[key] for key in (*self.axes, "replicate")}
                keys = {f"axis.{key}" if key in frame else key: value for key, value in keys.items()}
                frames.append(pd.concat([pd.DataFrame(keys, index=frame.index), frame], axis=1))
        if not frames:
            raise InputError(f"{self.folder}: every run failed")
        return pd.concat(frames, ignore_index=True)


def load_runs(folder: Path | str) -> Runs:
    """The runs in a folder that `infsim run --out` wrote. Raises InputError where there is none."""
    folders = tuple(run_folders(Path(folder)))
    if not folders:
        raise InputError(f"{folder}: holds no runs (a folder that `infsim run --out` wrote is expected)")
    manifests = tuple(manifest for path in folders if (manifest := read_manifest(path)))
    return Runs(Path(folder), folders, manifests)
