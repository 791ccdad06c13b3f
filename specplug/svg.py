"""One plot as SVG: how it is drawn, and how it is written into a page or a file. Text stays text, colours follow the page or the
reader's light or dark scheme.

matplotlib is imported when the first is drawn; pyplot, with its state of the whole process, never.
"""

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from specplug.escape import in_html, one_line

# Colours by role, light and dark: those of docs/lab.html. Told apart in every common kind of colour blindness, and each
# role has a marker or a line style of its own besides.
COLOURS = {
    "ink": ("#1f2630", "#e7e8ea"),
    "soft": ("#59626f", "#a9b1bd"),
    "line": ("#dcdad3", "#343a44"),
    "card": ("#ffffff", "#1c2027"),
    "plain": ("#3d4d69", "#c3cde0"),
    "assisted": ("#c17a1a", "#eba84f"),
    "ours": ("#00796b", "#4cc2b0"),
    "other": ("#7a4fc4", "#b99cf6"),
}
INK, SOFT, LINE, CARD, PLAIN, ASSISTED, OURS, OTHER = (light for light, _ in COLOURS.values())
FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
WIDTH = 4.0  # inches: two beside each other on a desktop, one on a phone, with text that can be read there
MARGIN = 9  # points around a plot that stands alone


class Plot(NamedTuple):
    name: str  # of its file
    title: str
    caption: str
    svg: str  # as matplotlib wrote it, in the light colours


def draw(name: str, title: str, caption: str, height: float, paint: Callable[[Any], None]) -> Plot:
    """One pair of axes, painted by `paint`."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "specplug",
        "text.parse_math": False,
        "font.family": "DejaVu Sans",  # what widths are measured with: comes with matplotlib, and is wide
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": SOFT,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.titlesize": 9,
        "grid.color": LINE,
        "grid.linewidth": 0.8,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's own fonts write the text
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name, title, caption, written.getvalue())


def inline(plot: Plot) -> str:
    """For a page that defines --ink, --ours, ...: no prologue, ids of its own, a name for who cannot see it."""
    svg = _body(plot)
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg


def save(plot: Plot, folder: Path) -> str:
    """Write it into `plots` of a run folder; returns the Markdown that shows it there."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    (folder / "plots" / f"{plot.name}.svg").write_text(standalone(plot), encoding="utf-8")
    return f"![{plot.title}](plots/{plot.name}.svg)"


def standalone(plot: Plot) -> str:
    """For a file: on a card of its own, dark for readers who like it dark, light where that is not understood."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in COLOURS.values()
        for kind in ("fill", "stroke")
    )
    svg = _body(plot)
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    wider, higher = width + 2 * MARGIN, height + 2 * MARGIN
    frame = f'viewBox="{-MARGIN} {-MARGIN} {wider} {higher}" width="{wider}pt" height="{higher}pt"'
    svg = re.sub(r' (?:viewBox|width|height)="[^"]*"', "", svg[: svg.index(">")]) + f" {frame}" + svg[svg.index(">") :]
    card = f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{wider}" height="{higher}" rx="6" style="fill: {CARD}"/>'
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{card}"
    return svg.replace("</desc>", f"</desc>{style}", 1) + "\n"


def _body(plot: Plot) -> str:
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
    svg = svg.replace("'DejaVu Sans'", FONT)
    name = (
        f'<title id="{plot.name}-title">{in_html(plot.title)}</title>'
        f'<desc id="{plot.name}-desc">{in_html(plot.caption)}</desc>'
    )
    labelled = f'role="img" aria-labelledby="{plot.name}-title" aria-describedby="{plot.name}-desc" '
    # By a function, since backslashes in a replacement are read.
    return re.sub(r"<svg ([^>]*)>", lambda found: f"<svg {labelled}{found[1]}>{name}", svg, count=1).rstrip()


def name_rows(axes: Any, names: list[str], longest: int = 22) -> None:
    """One row a name, the first at the top."""
    axes.set_yticks(range(len(names)), [one_line(name, longest) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def height_of(rows: int) -> float:
    return 1.05 + 0.3 * rows


def whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=9))
