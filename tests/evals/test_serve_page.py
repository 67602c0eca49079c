"""Figures of the server: the page that committed results give, and what the load generators report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "evals/serve"


@pytest.fixture
def modules(monkeypatch):
    """`page` and `clients` of evals/serve; other folders of evals have modules of these names."""
    monkeypatch.syspath_prepend(str(SERVE))
    names = ("page", "clients", "launch", "record")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    import clients
    import page

    yield page, clients
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_the_committed_page_is_what_the_results_give(modules):
    page, _ = modules
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    begin, end = "<!-- measured: made by evals/pages.py -->\n", "\n<!-- measured: end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == page.render(), "python evals/pages.py --write"


def test_a_table_of_results(modules, tmp_path):
    page, _ = modules
    about = {
        "commit": "abc",
        "date": "2026-01-01",
        "processor": "cpu",
        "cores": 2,
        "busy_before": 0.4,
        "clients": {"v": "1"},
    }
    about |= {"prompt_tokens": 64, "new_tokens": 32}
    rounds = [{"requests_per_s": rate, "ttft_ms": 5.0} for rate in (10.0, 30.0, 20.0)]
    data = {"about": about, "rows": [{"streams": 8, "client": "mine", "rounds": rounds}]}
    (tmp_path / "clients.json").write_text(json.dumps(data))
    text = page.render(tmp_path)
    assert "| streams | client | requests/s | TTFT ms |" in text
    assert "| 8 | mine | 20 | 5 |" in text
    assert "other processes kept 40% of it busy" in text
    assert text.count("Not measured yet.") == 3


def test_a_client_whose_requests_fail_has_no_figures(modules):
    _, clients = modules
    figure = {"successful": {"mean": 3.0, "median": 4.0}}
    names = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    metrics = {"request_totals": {"successful": 7}, **dict.fromkeys(names, figure)}
    report = {"benchmarks": [{"metrics": metrics}]}
    assert clients.of_guidellm(report, 7)["ttft_ms"] == 4.0
    with pytest.raises(SystemExit, match="7 of 8"):
        clients.of_guidellm(report, 8)
