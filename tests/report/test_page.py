"""The page: self-contained, readable without scripts, unique ids, text alternatives, equal bytes, nothing unescaped."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from quantkit.report.files import render_junit, render_markdown
from quantkit.report.page import keep_together, render_html, report_sections
from quantkit.report.plots import heat_edges, heat_labels, short_number
from quantkit.report.svg import COLOURS, new_figure, to_svg
from quantkit.report.tables import chance_note, headline, p_value
from quantkit.results import BenchmarkResult, EvaluationResult, ModelFacts, Report
from tests.report.synthetic import make_report

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects ids, links and texts, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.referred, self.sources, self.tags, self.open = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        for key in ("aria-labelledby", "aria-describedby"):
            self.referred += (given.get(key) or "").split()
        self.sources += [given[key] for key in ("src", "href", "xlink:href") if key in given]
        self.referred += re.findall(r"url\(#([^)]+)\)", str(given))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(broken=True)


@pytest.fixture(scope="module")
def text(report) -> str:
    return render_html(report)


def test_the_page_needs_nothing_from_outside_and_no_scripts(text):
    page = Page(text)
    assert all(source.startswith(("#", "data:")) for source in page.sources)
    assert not {"script", "iframe", "img"} & {tag for tag, _ in page.tags}
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_ids_are_unique_and_everything_referred_to_exists(text):
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    inside = {source[1:] for source in page.sources if source.startswith("#")}
    assert inside | set(page.referred) <= set(page.ids)


def test_every_plot_has_a_title_and_says_what_there_is_to_see(text):
    names = ["accuracy", "sensitivity", "ttft", "itl", "context", "memory", "roofline"]
    for name in names:
        title = re.search(rf'<title id="{name}-title">([^<]+)</title>', text)
        spoken = re.search(rf'<desc id="{name}-desc">([^<]+)</desc>', text)
        assert title, name
        assert len(spoken[1]) > 40
    assert text.count('<svg class="plot"') == len(names)


def test_plots_follow_the_theme_and_do_not_style_the_page(text):
    assert not any(placeholder in text for placeholder in COLOURS)
    body = text.partition("</style>")[2]
    assert "<style" not in body
    for variable, _ in COLOURS.values():
        if f"var({variable}," in body:
            assert text.count(f"{variable}:") >= 3, f"{variable} must be set for light, dark and print"


def test_equal_reports_give_equal_pages(report, text, drawn_once):
    drawn_once.clear()
    assert render_html(report) == text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)


def test_the_verdict_comes_first_with_each_remedy_once(text):
    order = [text.index(word) for word in ("gates did not hold", "To do:", "<dt>Size</dt>", 'id="accuracy"')]
    assert order == sorted(order)
    assert text.count("<strong>To do:</strong>") == 1


def forged(value, text: str, key: str = ""):
    """A report's data with `text` behind every text that is not one of a few words, names of entries included."""
    if isinstance(value, dict):
        free = key in ("settings", "versions", "hashes", "seeds", "unquantized", "others")
        return {name + text if free else name: forged(entry, text, name) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [forged(entry, text, key) for entry in value]
    return value + text if isinstance(value, str) and key not in FEW_WORDS else value


FEW_WORDS = ("mode", "phase", "through", "verdict", "action")


def test_a_report_of_a_stranger_brings_no_element_and_no_formula(report):
    """Mathematics between dollar signs ended the drawing of a plot with matplotlib's own error."""
    nasty = """<b>&\"'><img src=x onerror=alert(1)><script>alert(1)</script>$x_{$ $\\frac{$\x1b[2J"""
    read = Report.from_dict(forged(report.to_dict(), nasty))
    page = Page(render_html(read))
    assert not {"b", "img", "script"} & {tag for tag, _ in page.tags}
    assert not [given for _, given in page.tags if "onerror" in given]
    card = render_markdown(read).split("---\n", 2)[2]
    assert not re.search("<(b|img|script)", card)
    assert ElementTree.fromstring(render_junit(read).encode()).get("name").endswith(r"\x1b[2J")


SECTIONS = [
    "accuracy",
    "fidelity",
    "behaviour",
    "sensitivity",
    "diagnosis",
    "speed",
    "memory",
    "roofline",
    "making",
    "terms",
]


def test_sections_stand_in_the_order_of_decision(report):
    assert [section.name for section in report_sections(report)] == SECTIONS


def test_what_was_not_measured_is_left_out():
    bare = Report(model=ModelFacts(name="x"))
    assert [section.name for section in report_sections(bare)] == ["making", "terms"]
    page = render_html(bare)
    Page(page)
    assert "No gates were set" in page
    empty = dataclasses.replace(bare, evaluation=EvaluationResult(model="x"), benchmark=BenchmarkResult(model="x"))
    Page(render_html(empty))


def test_a_model_alone_without_its_original_is_shown(report):
    alone = dataclasses.replace(report, baseline_benchmark=None, noise_fidelity=None, noise=None, baseline_model=None)
    page = render_html(alone)
    Page(page)
    assert "The noise floor was not measured" in page
    assert "not compared with an original" in page


def test_settings_of_the_user_do_not_reach_the_plots():
    matplotlib = pytest.importorskip("matplotlib")

    def draw() -> str:
        with new_figure() as (figure, axes):
            axes.plot([0, 1], [0, 1])
            return to_svg(figure, "x", "t", "d")

    before = draw()
    with matplotlib.rc_context({"font.size": 40, "axes.facecolor": "red"}):
        assert draw() == before


def test_shades_cover_all_values_in_order():
    edges = heat_edges([1e-5, 2e-4, 3e-4, 1e-3, 0.1])
    assert edges == sorted(edges)
    steps = [bisect_left(edges, value) for value in (0.0, 2e-4, 1e-3, 0.05, 0.1)]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 5)
    assert len(heat_labels(edges)) == 6
    assert heat_edges([0.0, 0.0]) == sorted(heat_edges([0.0, 0.0]))


WORDS = [
    (p_value(0.0), "<0.001"),
    (p_value(None), "-"),
    (short_number(95e9), "95 G"),
    (short_number(0.0), "0"),
    (chance_note(3), ""),
    (keep_together("12 ms (1.0 to 2.0)"), "12\u00a0ms (1.0\u00a0to\u00a02.0)"),
]


@pytest.mark.parametrize(("written", "expected"), WORDS)
def test_numbers_in_words(written, expected):
    assert written == expected


def test_many_rows_come_with_a_warning_of_chance():
    assert "about 1.0 would look different by chance" in chance_note(20)


def test_the_verdict_counts_gates(report):
    assert headline(report).startswith("4 of 6 gates did not hold: recovery>=98.9, ")
    held = dataclasses.replace(report, gates=report.gates[4:])
    assert headline(held) == "All 2 gates hold."
    assert headline(dataclasses.replace(report, gates=report.gates[4:5])) == "The gate holds."


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark", "print"])
def test_text_and_marks_stand_out_in_every_theme(theme, text):
    """WCAG: 4.5 for text, 3 for marks."""
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{([^}]+)\}", text)[theme]))
    for back in ("paper", "panel"):
        for name in ("ink", "muted", "link", "good", "bad"):
            assert contrast(colours[name], colours[back]) >= 4.5, (name, back)
    for name in ("model", "original", "heat5"):
        assert contrast(colours[name], colours["paper"]) >= 3, name
    steps = [luminance(colours[f"heat{i}"]) for i in range(6)]
    assert steps in (sorted(steps), sorted(steps, reverse=True))
