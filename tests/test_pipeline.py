"""What pipelines run: .ci/verify with the gates that it shows, the action's inputs, the workflows' scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from quantkit.report.files import render_markdown
from quantkit.report.tables import gate_lines, headline
from tests.report.synthetic import make_report

ROOT = Path(__file__).parents[1]
# Stands for the command: notes its arguments, writes a report and exits as it is told to.
QUANTKIT = """#!{python}
import os, pathlib, sys
pathlib.Path("arguments").write_text("\\n".join(sys.argv[1:]))
folder = pathlib.Path(os.environ["REPORT"])
if os.environ["CODE"] != "4":
    folder.mkdir()
    (folder / "README.md").write_text(os.environ["CARD"])
sys.exit(int(os.environ["CODE"]))
"""


def verify(folder: Path, code: int, **settings: str) -> int:
    command = folder / "quantkit"
    command.write_text(QUANTKIT.format(python=sys.executable))
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CODE": str(code),
        "CARD": render_markdown(make_report()),
        "CHECKPOINT": "my model",
        "REPORT": "report",
        "GITHUB_STEP_SUMMARY": "summary",
        **settings,
    }
    return subprocess.run([ROOT / ".ci/verify"], cwd=folder, env=environment, timeout=60).returncode


def test_inputs_become_arguments_and_nothing_is_read_as_a_command(tmp_path):
    asked = {"GATES": "kl<=0.05\n\n recovery>=98.9; rm -rf x", "BASELINE": "$(b)"}
    asked["ARGUMENTS"] = "--suite none  --no-bench"
    assert verify(tmp_path, 0, **asked) == 0
    assert (tmp_path / "arguments").read_text().splitlines() == [
        *("verify", "my model", "--output", "report", "--baseline", "$(b)"),
        *("--gate", "kl<=0.05", "--gate", "recovery>=98.9; rm -rf x", "--suite", "none", "--no-bench"),
    ]


def test_the_verdict_and_the_gates_of_the_card_are_shown_and_a_failed_one_keeps_its_exit_code(tmp_path):
    report = make_report()
    assert verify(tmp_path, 3) == 3
    shown = (tmp_path / "summary").read_text()
    assert shown == (tmp_path / "report/gates.md").read_text()
    title, *lines = shown.splitlines()
    assert title == f"# {report.model.name}"
    assert headline(report) in shown
    assert lines[-1 - len(gate_lines(report.gates)) : -1] == [f"- {line}" for line in gate_lines(report.gates)]


def test_without_a_report_the_exit_code_alone_tells(tmp_path):
    assert verify(tmp_path, 4) == 4
    assert not (tmp_path / "summary").exists()


def test_the_action_gives_the_script_all_of_its_inputs():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = action["runs"]["steps"]
    given = next(step["env"] for step in steps if step.get("id") == "verify")
    script = (ROOT / ".ci/verify").read_text(encoding="utf-8")
    for name in ("checkpoint", "baseline", "gates", "arguments", "report"):
        assert given[name.upper()] == f"${{{{ inputs.{name} }}}}"
        assert f"${name.upper()}" in script.replace("${", "$")
    assert all("${{" not in step["run"] for step in steps), "an input in a script is run as code"


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name)
def test_workflows_run_scripts_that_exist(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert all("${{" not in command for command in commands)
    for command in commands:
        program = command.split()[0]
        assert program in ("pip", "pytest", "python") or os.access(ROOT / program, os.X_OK), command
