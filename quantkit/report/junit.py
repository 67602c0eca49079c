"""JUnit XML, which CI systems show: one test per gate, one per task and text compared.

A gate that did not hold is a failure. A task that got worse is one too only when it has a gate; else it is told in
the test's output, because nothing was promised about it.
"""

from xml.etree import ElementTree

from quantkit.quantities import number
from quantkit.report.words import VERDICTS, recovery_text
from quantkit.results import Report


def render_junit(report: Report) -> str:
    """Gates and comparisons of a report as test suites."""
    root = ElementTree.Element("testsuites", name=f"quantkit verify {report.model.name}")
    _gates(root, report)
    _comparisons(root, report)
    suites = list(root)
    for key in ("tests", "failures"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _gates(root: ElementTree.Element, report: Report) -> None:
    failed = sum(not gate.held for gate in report.gates)
    suite = ElementTree.SubElement(root, "testsuite", name="gates", tests=str(len(report.gates)), failures=str(failed))
    for gate in report.gates:
        case = ElementTree.SubElement(suite, "testcase", classname="quantkit.results.gates", name=gate.gate)
        if not gate.held:
            failure = ElementTree.SubElement(case, "failure", message=gate.explanation, type="gate")
            failure.text = gate.remedy
        else:
            ElementTree.SubElement(case, "system-out").text = gate.explanation


def _comparisons(root: ElementTree.Element, report: Report) -> None:
    count = str(len(report.comparisons))
    suite = ElementTree.SubElement(root, "testsuite", name="comparisons", tests=count, failures="0")
    for comparison in report.comparisons:
        case = ElementTree.SubElement(suite, "testcase", classname="quantkit.comparisons", name=comparison.subject)
        values = f"{comparison.metric}: {number(comparison.baseline, 4)} before, {number(comparison.value, 4)} now"
        text = f"{values}; recovery {recovery_text(comparison)}; {VERDICTS[comparison.verdict]}"
        ElementTree.SubElement(case, "system-out").text = text
