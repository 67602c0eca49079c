"""What becomes of kernels that crash, hang or are wrong where they have never run; and what users are told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit import LLM
from quantkit.kernels import gpu
from quantkit.runtime import llm
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine import first_run, status
from quantkit.runtime.engine.kernel_checks import Check
from tests.runtime import planted

DEVICE = torch.device("cpu")
ABOUT = {"device": "pretended", "driver": "1", "torch": "2", "triton": "3", "kernels": "4"}


@pytest.fixture
def load(monkeypatch, tmp_path, caplog):
    """Loads a model whose checks are these on a device that says it is new; what was logged."""
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(gpu, "_replaced", {})
    monkeypatch.setattr(first_run, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(first_run, "identity", lambda device: ABOUT)
    monkeypatch.setattr(first_run, "_SECONDS", 100.0)
    monkeypatch.delenv("QUANTKIT_TRITON", raising=False)

    def load(**checks):
        monkeypatch.setattr(gpu, "_replaced", {})  # as another process
        made = [Check(*[*name.split("__"), "int4"][:2], run) for name, run in checks.items()]
        monkeypatch.setattr(first_run, "checks_of", lambda *_, **__: made)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            first_run.check_kernels(Path("model"), EngineConfig(), DEVICE)
        return [record.message for record in caplog.records]

    return load


@pytest.fixture
def no_child(monkeypatch):
    def refuse():
        def run(*_, **__):
            raise AssertionError("a child is started")

        monkeypatch.setattr(subprocess, "run", run)

    return refuse


def test_families_that_are_wrong_or_end_their_child_are_replaced(load, no_child, monkeypatch, tmp_path):
    # Nor does a child import what lies in the folder that it is started in.
    (tmp_path / "torch.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry] + [str(Path(__file__).parents[2])])
    given = {
        "ops__right": planted.right,
        "ops__wrong": planted.wrong,
        "ops__chatty": planted.chatty,
        "attention__crash": planted.crash,
        "head__infinite": planted.infinite,
        "head__fail": planted.fail,
    }
    reasons = {
        "ops": "wrong: 20.00% of the largest number off torch",
        "attention": "crash: SIGSEGV",
        "head": "infinite: nan% of the largest number off torch",
    }
    first, *said = load(**given)
    assert first == "first run of GPU kernels on cpu: comparing them with torch, 100 s at most"
    assert {family: reason for family in gpu.FAMILIES if (reason := gpu.why_replaced(family, DEVICE))} == reasons
    lines = [f"GPU kernels for {gpu.FAMILIES[family]}: {reason}; torch does" for family, reason in reasons.items()]
    assert all(any(line.startswith(start) for line in said) for start in lines)
    assert len(said) == len(lines)
    text = first_run.describe_kernels(DEVICE)
    assert text.count("torch in place of") == 3
    assert f"torch in place of norms, rotation and gates: {reasons['ops']}" in text
    # What is known is not tried again, but for what gave no result, once.
    verdicts = first_run.read_verdicts(DEVICE)
    illegal = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert verdicts["head: fail"] == (False, illegal, False)
    assert {key for key, verdict in verdicts.items() if not verdict.is_final} == {"head: fail", "attention: crash"}
    assert {key for key, verdict in verdicts.items() if verdict.passed} == {"ops: right", "ops: chatty"}
    assert verdicts["ops: chatty"] == (True, "0.00% of the largest number off torch", True)  # its print is no result
    no_child()
    assert len(load(ops__wrong=planted.wrong, head__infinite=planted.infinite)) == 2
    assert gpu.why_replaced("ops", DEVICE) == reasons["ops"]


def test_half_a_line_and_lines_of_others_say_nothing(load, monkeypatch):
    said = b'hello\n\xff\n5\n[]\n["a", 1, 2]\n[[], 1]\n["other", 0]\n["ops: a", null]\n["ops: b", 0.0]\n["ops: a", 0.'
    done = subprocess.CompletedProcess([], -9, stdout=said, stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    load(ops__a=planted.right, ops__b=planted.right)
    verdicts = first_run.read_verdicts(DEVICE)
    assert {key: (verdict.passed, verdict.is_final) for key, verdict in verdicts.items()} == {
        "ops: a": (False, False),
        "ops: b": (True, True),
    }


def test_what_hangs_is_ended_and_tried_twice(load, no_child, monkeypatch):
    monkeypatch.setattr(first_run, "_SECONDS", 1.0)
    for is_final in (False, True):
        _, said = load(attention=planted.hang)
        assert "attention over pages: int4: no result within 1 s; torch does their work on cpu" in said
        assert first_run.read_verdicts(DEVICE)["attention: int4"] == (False, "no result within 1 s", is_final)
    no_child()
    assert len(load(attention=planted.hang)) == 1


def test_a_second_try_that_gives_a_result_counts(load, no_child):
    first_run._write(DEVICE, {"ops: int4": first_run.Verdict(False, "SIGSEGV", False)})
    assert len(load(ops=planted.right)) == 1
    assert gpu.why_replaced("ops", DEVICE) is None
    assert first_run.describe_kernels(DEVICE) == "as torch in all checks"
    no_child()
    assert load(ops=planted.right) == []


def test_another_device_driver_or_version_is_new(load, monkeypatch):
    first_run._write(DEVICE, {"ops: int4": first_run.Verdict(True, "", True)})
    assert first_run.read_verdicts(DEVICE)
    for name in ABOUT:
        monkeypatch.setattr(first_run, "identity", lambda device, name=name: {**ABOUT, name: "another"})
        assert first_run.read_verdicts(DEVICE) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"ops: int4": 3}', '{"ops: int4": [true, ""]}'])
def test_a_file_that_is_broken_knows_nothing(load, text):
    first_run.verdict_file(DEVICE).write_text(text)
    assert first_run.read_verdicts(DEVICE) == {}


def test_force_skips_it(load, no_child, monkeypatch):
    no_child()
    monkeypatch.setenv("QUANTKIT_TRITON", "force")
    assert load(ops=planted.crash) == []
    assert first_run.describe_kernels(DEVICE) == "not checked: QUANTKIT_TRITON=force"


def test_what_is_known_can_be_shown(load, monkeypatch, capsys):
    from quantkit.cli import main

    verdicts = {"ops: silu": (True, "0.10% off", True), "head: int4": (False, "SIGSEGV", False)}
    first_run._write(DEVICE, {key: first_run.Verdict(*verdict) for key, verdict in verdicts.items()})
    monkeypatch.setattr("quantkit.devices.pick_device", lambda name: DEVICE)
    for given, wanted in ((["--json"], None), ([], ("pretended", "kernels: 0.10% off", "torch: SIGSEGV"))):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", "--device", *given])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if wanted is None:
            document = json.loads(out)
            assert document["about"]["driver"] == "1"
            assert document["checks"]["head: int4"] == {"passed": False, "text": "SIGSEGV", "is_final": False}
        else:
            assert all(part in out for part in wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("given", [["--device"], ["model", "--device", "cpu"], ["--device", "cpu"]], ids=str)
def test_without_a_device_there_is_nothing_to_show(given, capsys):
    from quantkit.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["inspect", *given])
    assert ended.value.code == (2 if "model" in given else 4)
    assert capsys.readouterr().err


def test_models_and_their_drafts_are_checked_before_they_are_loaded(family_models, monkeypatch):
    asked = []
    monkeypatch.setattr(llm, "check_kernels", lambda path, *_, draft=False: asked.append((path, draft)))
    monkeypatch.setattr(llm, "load_model", lambda path, **_: asked.append(path) or SimpleNamespace())
    monkeypatch.setattr(llm, "build_engine", lambda *_, **__: None)
    path = family_models["llama"]
    LLM(path, device="cpu", threads=1, speculate=str(path))
    assert asked == [(path, False), (path, True), path, path]


def test_stats_speak_of_it(load, family_models, monkeypatch):
    monkeypatch.setattr(llm, "check_kernels", lambda *_, **__: None)
    engine = LLM(family_models["llama"], device="cpu", threads=1).engine
    monkeypatch.setattr(engine.model, "device", torch.device("meta"))
    assert status.describe_engine(engine, "")["GPU kernels"] == "as torch in all checks"
