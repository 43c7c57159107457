"""Makes the paper's figures and the page about them: `python paper_figures [10a ...] [--full] [--fresh]`, or `make figures`."""

import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from page import write_page
from sheet import make, parser_of, stem_of, study_from
from study import NoData, Study

HERE = Path(__file__).resolve().parent


def scripts() -> dict[str, ModuleType]:
    """All figures' scripts, by the paper's number."""
    found = (importlib.import_module(path.stem) for path in sorted(HERE.glob("fig*.py")))
    return {script.FIGURE: script for script in found}


def choose(names: Sequence[str], known: dict[str, ModuleType]) -> list[ModuleType]:
    """The named figures, all where none is named; "2a" and "7c" mean the script that draws 2 and 7."""
    chosen = {name if name in known else name.rstrip("abc") for name in names}
    strangers = chosen - set(known)
    if strangers:
        sys.exit(f"figures: {min(strangers)} is not one of {', '.join(known)}")
    return [script for name, script in known.items() if not names or name in chosen]


def make_all(chosen: Iterable[ModuleType], study: Study) -> None:
    """Each figure in turn; one whose data is not here is skipped, and its entry says why."""
    for script in chosen:
        started_s = time.perf_counter()
        print(f"figure {script.FIGURE}: {script.TITLE} ...", file=sys.stderr, flush=True)
        try:
            make(script, study)
            told = f"{time.perf_counter() - started_s:.0f} s"
        except NoData as reason:
            skipped = {"figure": script.FIGURE, "stem": stem_of(script), "title": script.TITLE, "skipped": str(reason)}
            study.out.mkdir(parents=True, exist_ok=True)
            (study.out / f"{stem_of(script)}.json").write_text(json.dumps(skipped, indent=1) + "\n", encoding="utf-8")
            told = f"skipped: {reason}"
        print(f"figure {script.FIGURE}: {told}", file=sys.stderr, flush=True)


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="such as 10a (default: all)")
    parser.add_argument("--page", action="store_true", help="also write paper_figures/README.md with its pictures")
    arguments = parser.parse_args()
    study = study_from(arguments)
    make_all(choose(arguments.figures, scripts()), study)
    pages = [write_page(study.out, study.out)]
    pages += [write_page(study.out, HERE, HERE / "pictures")] if arguments.page else []
    print("\n".join(str(page) for page in pages))


if __name__ == "__main__":
    main()
