"""Convert matplotlib figures to reproducible inline SVG with theme colours, unique ids and text alternatives.

matplotlib draws with placeholder colours, which are replaced by CSS variables, so that one drawing serves light mode,
dark mode and print. Text is kept as text.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quantkit.distribution import install_command
from quantkit.errors import ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholder -> CSS variable, and the colour in a viewer without the page's style.
COLOURS = {
    # Near-black values that matplotlib does not write by itself, so replacing them affects nothing else.
    "#010203": ("--ink", "#1c2127"),
    "#010204": ("--muted", "#59636e"),
    "#010205": ("--line", "#d5dae0"),
    "#010206": ("--model", "#0b62a8"),
    "#010207": ("--original", "#9a5b00"),
    "#010209": ("--bad", "#b3261e"),
    "#010210": ("--heat0", "#eef3f8"),
    "#010211": ("--heat1", "#f5dfb2"),
    "#010212": ("--heat2", "#f2b66d"),
    "#010213": ("--heat3", "#e07b39"),
    "#010214": ("--heat4", "#bd3a2a"),
    "#010215": ("--heat5", "#7a1226"),
}
INK, MUTED, LINE, MODEL, ORIGINAL, BAD, *HEAT = COLOURS

STYLE: dict[str, Any] = {
    # Ids are hashes: without a fixed salt, every run would write different bytes.
    "svg.hashsalt": "quantkit",
    # Text as text can be searched, copied and read aloud; as outlines it cannot.
    "svg.fonttype": "none",
    # Names come from files, and matplotlib would parse text between dollar signs as mathematics, which may fail.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
INSTALL = install_command("eval")


@contextmanager
def new_figure(width: float = 5.2, height: float = 3.2) -> Iterator[tuple[Figure, Any]]:
    """Create a figure (size in inches) and its axes for use inside the block, in quantkit's style.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError(f"report.html needs matplotlib, which is not installed; {INSTALL}") from None
    defaults: Any = matplotlib.rcParamsDefault
    # Start from the defaults: a user's matplotlibrc would change fonts and sizes, and so the bytes of the file.
    settings: Any = {**defaults, **STYLE, "backend": "svg"}
    with matplotlib.rc_context(settings):
        # `Figure`, not pyplot, which keeps figures alive in a global list.
        figure = Figure(figsize=(width, height))
        yield figure, figure.subplots()


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """Convert a figure to an `<svg>` element for a page.

    Args:
        figure: figure drawn with the placeholder colours.
        name: one word, unique on the page; every id starts with it.
        title: short title.
        description: text alternative for people who cannot see the figure.
    """
    buffer = io.StringIO()
    # With a date, equal reports would have different bytes.
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = "<svg" + buffer.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # matplotlib's style element has the selector `*`, which would apply to the whole page.
    text = re.sub(r"<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = _own_ids(text, name)
    for placeholder, (variable, fallback) in COLOURS.items():
        text = text.replace(placeholder, f"var({variable}, {fallback})")
    return _open_tag(text, name, title, description)


def _own_ids(text: str, name: str) -> str:
    """Prefix all ids that are referenced with `name`, and remove all other ids."""
    # Several figures share one page, and matplotlib gives equal elements of different figures equal ids.
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r"href=\"#([^\"]+)\"", text))
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r"href=\"#([^\"]+)\"", rf'href="#{name}-\1"', text)
    return re.sub(r" id=\"([^\"]+)\"", lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)


def _open_tag(text: str, name: str, title: str, description: str) -> str:
    tag, rest = text.split(">", 1)
    width, height = (float(value) for value in re.findall(r" (?:width|height)=\"([\d.]+)pt\"", tag))
    # Without width and height a figure scales with its column; the viewBox keeps its proportions.
    opening = (
        f'<svg class="plot" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" '
        'style="stroke-linejoin: round; stroke-linecap: butt">'
    )
    labels = (
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(description)}</desc>'
    )
    return opening + labels + rest.rstrip()
