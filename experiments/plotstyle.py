"""One look for every picture: colours and marks of the systems, sizes, PNG and SVG that are the same every time."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
)
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
SYSTEM_COLOURS = {"vllm-multi": BLUE, "vllm-single": ORANGE, "infinite-llm": GREEN}
MARKERS = "osD^vPX"
GREY = "#666666"

STYLE: Any = {  # matplotlib types the keys one by one
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "infsim",
    "svg.fonttype": "none",
}


Draw = TypeVar("Draw", bound=Callable[..., Any])


def styled(draw: Draw) -> Draw:
    """Decorator: draw in this style, and leave that of the caller's own pictures alone."""

    @wraps(draw)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return wrapped  # type: ignore[return-value]


def new_figure(rows: int, columns: int, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes; sizes in inches a panel. Needs no display and leaves no global state."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


@styled
def save(figure: Figure, stem: Path) -> list[Path]:
    """`stem`.png and `stem`.svg, without the date."""
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    return paths


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    plain_numbers(axes.yaxis, (1.0, 2.0, 5.0))


def plain_numbers(axis: Axis, subs: Sequence[float]) -> None:
    """Label a logarithmic axis at these multiples of powers of ten."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def looks(contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every contender; systems keep their colours in every picture."""
    free = [colour for colour in CYCLE if colour not in {SYSTEM_COLOURS.get(name) for name in contenders}]
    found = {}
    for i, name in enumerate(contenders):
        colour = SYSTEM_COLOURS.get(name) or free[i % len(free)]
        found[name] = {"color": colour, "marker": MARKERS[i % len(MARKERS)]}
    return found
