"""Kernels that crash, hang or are wrong where they have never run: torch replaces them, and users are told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit import LLM
from quantkit.kernels import gpu
from quantkit.runtime import llm
from quantkit.runtime.engine import kernel_check
from quantkit.runtime.engine.kernel_check import Verdict
from tests import forked
from tests.runtime import planted

DEVICE = torch.device("cpu")
ABOUT = {"device": "pretended", "driver": "1", "torch": "2", "triton": "3", "kernels": "4"}


@pytest.fixture
def load(monkeypatch, tmp_path, caplog):
    """Make a first load on a device that pretends to be new, with these cases by family; return the warnings."""
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(gpu, "_replaced", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_check, "identity", lambda device: ABOUT)
    monkeypatch.setattr(kernel_check, "_SECONDS", 100.0)
    monkeypatch.setattr(kernel_check, "CASES", {})
    monkeypatch.delenv("QUANTKIT_TRITON", raising=False)

    def load(**families):
        monkeypatch.setattr(gpu, "_replaced", {})  # as another process
        planted.plant(families)
        code = f"from tests.runtime.planted import plant; plant({families!r}); "
        monkeypatch.setattr(
            kernel_check, "_CHILD", f"{code}from quantkit.runtime.engine.kernel_check import main; main()"
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="quantkit"):  # a command with --quiet leaves another level
            kernel_check.check_kernels(DEVICE)
        return [record.message for record in caplog.records]

    return load


@pytest.fixture
def forked_children(monkeypatch):
    """Children from a process that has torch, whose import takes each of them seconds."""

    def run(command, *, capture_output, timeout, env):
        _, _, code, *arguments = command
        with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
            process = forked.start(planted.run_code, code, arguments, [stdout.name, stderr.name], env)
            process.join(timeout)
            if process.exitcode is None:
                process.kill()
                raise subprocess.TimeoutExpired(command, timeout, output=stdout.read())
            return subprocess.CompletedProcess(command, process.exitcode, stdout.read(), stderr.read())

    monkeypatch.setattr(subprocess, "run", run)


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
    first, *said = load(ops="right,chatty", attention="crash", experts="infinite", quantized_linear="right,wrong")
    assert first == "comparing the GPU kernels with torch on cpu; this takes at most 100 s"
    reasons = {
        "attention": "crash: SIGSEGV",
        "experts": "infinite: nan% error relative to torch's largest value",
        "quantized_linear": "wrong: 20.00% error relative to torch's largest value",
    }
    assert {family: reason for family in gpu.FAMILIES if (reason := gpu.why_replaced(family, DEVICE))} == reasons
    lines = [f"GPU kernels for {gpu.FAMILIES[family]}: {reason}; torch replaces" for family, reason in reasons.items()]
    assert all(any(line.startswith(start) for line in said) for start in lines)
    assert len(said) == len(lines)
    text = kernel_check.describe_kernels(DEVICE)
    assert text.count("torch replaces") == 3
    assert f"torch replaces attention over pages: {reasons['attention']}" in text
    # A print is no result; and what is known is not tried again.
    assert kernel_check.read_verdicts(DEVICE)["ops"] == Verdict(
        True, "at most 0.00% error relative to torch's largest value"
    )
    no_child()
    assert len(load(ops="right", attention="crash", experts="infinite", quantized_linear="wrong")) == 3
    assert gpu.why_replaced("attention", DEVICE) == reasons["attention"]


def test_a_refusal_of_triton_is_no_success(load, forked_children):
    load(ops="right,fail")
    reason = "fail: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert gpu.why_replaced("ops", DEVICE) == reason


def test_half_a_line_and_lines_of_others_say_nothing(load, monkeypatch):
    said = b'hello\n\xff\n5\n[]\n["a", 1, 2]\n[[], 1]\n["other", 0]\n["wrong", null]\n["right", 0.0]\n["wrong", 0.'
    done = subprocess.CompletedProcess([], -9, stdout=said, stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    load(ops="right", attention="right,wrong")
    assert {family: verdict.passed for family, verdict in kernel_check.read_verdicts(DEVICE).items()} == {
        "ops": True,
        "attention": False,
    }


def test_a_family_that_hangs_is_ended_and_tried_again_at_the_next_load(load, forked_children, no_child, monkeypatch):
    monkeypatch.setattr(kernel_check, "_SECONDS", 1.0)
    _, said = load(attention="hang")
    assert "attention over pages: hang: no result within 1 s; torch replaces them on cpu" in said
    monkeypatch.setattr(kernel_check, "_SECONDS", 100.0)
    first, *said = load(attention="right")
    assert (first[:9], said) == ("comparing", [])
    no_child()
    assert load(attention="right") == []


def test_another_device_driver_or_version_is_new(load, monkeypatch):
    planted.plant({"ops": "right"})
    kernel_check.verdict_file(DEVICE).write_text(json.dumps({"ops": Verdict(True, "")}))
    assert kernel_check.read_verdicts(DEVICE)
    for name in ABOUT:
        monkeypatch.setattr(kernel_check, "identity", lambda device, name=name: {**ABOUT, name: "another"})
        assert kernel_check.read_verdicts(DEVICE) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"ops": 3}', '{"ops": [true]}', '{"head": [true, ""]}'])
def test_a_file_that_is_broken_or_old_knows_nothing(load, text):
    planted.plant({"ops": "right"})
    kernel_check.verdict_file(DEVICE).write_text(text)
    assert kernel_check.read_verdicts(DEVICE) == {}


def test_force_skips_it(load, no_child, monkeypatch):
    no_child()
    monkeypatch.setenv("QUANTKIT_TRITON", "force")
    assert load(ops="crash") == []
    assert kernel_check.describe_kernels(DEVICE) == "not checked: QUANTKIT_TRITON=force"


def test_inspect_makes_the_same_test_and_the_next_load_knows_it(load, forked_children, no_child, monkeypatch, capsys):
    from quantkit.cli import main

    load(ops="right", attention="wrong")
    monkeypatch.setattr("quantkit.machine.devices.pick_device", lambda name: DEVICE)
    verdicts = {"ops": Verdict(True, "0.10% off"), "attention": Verdict(False, "SIGSEGV")}
    monkeypatch.setattr(kernel_check, "_try", lambda device, family: verdicts[family])
    assert main(["inspect", "--device", "--json"], standalone_mode=False) in (None, 0)
    document = json.loads(capsys.readouterr().out)
    assert document["checks"] == {family: verdict._asdict() for family, verdict in verdicts.items()}
    assert document["about"]["device"] == "pretended"
    main(["inspect", "--device"], standalone_mode=False)
    table = capsys.readouterr().out
    assert "kernels: 0.10% off" in table
    assert "torch: SIGSEGV" in table
    no_child()
    assert len(load(ops="right", attention="wrong")) == 1
    assert gpu.why_replaced("attention", DEVICE) == "SIGSEGV"


def test_every_family_has_cases():
    assert kernel_check.CASES.keys() == gpu.FAMILIES.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("given", [["--device"], ["model", "--device", "cpu"], ["--device", "cpu"]], ids=str)
def test_without_a_device_there_is_nothing_to_show(given, capsys):
    from quantkit.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["inspect", *given])
    assert ended.value.code == (2 if "model" in given else 4)
    assert capsys.readouterr().err


def test_kernels_are_checked_before_a_model_is_loaded(family_models, monkeypatch):
    asked = []
    monkeypatch.setattr(llm, "check_kernels", asked.append)
    monkeypatch.setattr(llm, "load_model", lambda path, **_: asked.append(path) or SimpleNamespace())
    monkeypatch.setattr(llm, "build_engine", lambda *_, **__: None)
    path = family_models["llama"]
    LLM(path, device="cpu", threads=1, speculate=str(path))
    assert asked == [torch.device("cpu"), path, path]


def test_stats_speak_of_it(load, family_models, monkeypatch):
    monkeypatch.setattr(llm, "check_kernels", lambda device: None)
    loaded = LLM(family_models["llama"], device="cpu", threads=1)
    monkeypatch.setattr(loaded.model, "device", torch.device("meta"))
    assert loaded.describe()["GPU kernels"] == "agree with torch in all checks"


def test_verdicts_are_kept_in_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kernel_check.cache_folder()
    assert folder == tmp_path / "quantkit/kernel-checks"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_not_used(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_check.cache_folder().chmod(mode)
    fresh = kernel_check.cache_folder()
    assert not fresh.is_relative_to(tmp_path / "quantkit")
    assert fresh.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not kernel_check.cache_folder().is_relative_to(tmp_path / "file")


def test_a_user_without_a_home_gets_a_folder_for_this_process(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_check.Path, "home", homeless)
    assert kernel_check.cache_folder().is_dir()
