"""How the figures look: one colour an arm in all of them, and export to inline SVG and to PNG."""

import io
import re
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Text stays text: the page's own (narrower) font replaces the one that the layout was computed with.
RC = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#1f2328",
    "axes.titlesize": 10,
    "xtick.color": "#1f2328",
    "ytick.color": "#1f2328",
    "text.color": "#1f2328",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
WIDTH = 5.6  # inches; also readable when a phone shows it at 60 %
PAT_COLOUR = "#d1495b"
STATIC_COLOURS = ("#8d99ae", "#2e6f9e", "#2a9d8f", "#6a4c93", "#b08900", "#1d3557")
ORACLE_COLOUR = "#1f2328"
PART_COLOURS = ("#2e6f9e", "#8fb8d6", "#e0a458", "#2a9d8f", "#6a4c93", "#d1495b", "#8d99ae")


def arm_colours(arms: Sequence[str]) -> dict[str, str]:
    """PAT has the accent colour, the oracle is black; the others have their place's in the order of the arms."""
    fixed = {"pat": PAT_COLOUR, "oracle": ORACLE_COLOUR}
    others = [name for name in arms if name not in fixed]
    colours = {name: STATIC_COLOURS[i % len(STATIC_COLOURS)] for i, name in enumerate(others)}
    return colours | {name: colour for name, colour in fixed.items() if name in arms}


def plain_figure(height: float) -> tuple[Figure, Axes]:
    """A figure of the page's width, `height` inches high, with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element for HTML. Ids are salted with `name`, so that they differ in a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(RC | {"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    element = text[text.index("<svg") :]
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element, count=2)  # HTML knows these namespaces
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
