"""Nothing of the user's is deleted, replaced or written through, whichever command runs and however it ends."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from quantkit.evaluate.verify.pair_checks import check_output, check_pair
from quantkit.inspection import inspect
from quantkit.output import writer
from quantkit.output.staging import open_stage
from quantkit.output.work_folder import work_folder
from quantkit.report.files import SIGNS, read_report, write_report
from tests import forked
from tests.helpers import TEXT, make_model, tree
from tests.report.synthetic import make_report


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model `m`, its codes in `q`, and a text."""
    import quantkit

    folder = tmp_path_factory.mktemp("source")
    make_model(folder / "m", dtype=torch.bfloat16)
    overrides = {"weights.group_size": 32, "format": "gptq"}
    quantkit.quantize(folder / "m", "rtn-int4", folder / "q", overrides=overrides, device="cpu")
    (folder / "text.txt").write_text(TEXT)
    return folder


ROUND = ("quantize", "{source}/m", "--recipe", "rtn-int4", "--set", "weights.group_size=32", "--quiet", "-o")
SEARCH = ("search", "{source}/m", "--recipe", "rtn-int4", "--set", "weights.group_size=32", "--bits", "9", "--threads")
SEARCH += ("1", "--candidates", "int4:32", "--text", "{source}/text.txt", "--tokens", "64", "--quiet")
# Arguments, output, and every folder that the command works in.
COMMANDS = {
    "quantize": ((*ROUND, "{here}/out"), "out", ["out.partial"]),
    "quantize to gguf": ((*ROUND, "{here}/m.gguf", "--set", "format=gguf"), "m.gguf", ["m.gguf.partial"]),
    "convert": (("convert", "{source}/q", "--to", "awq", "-o", "{here}/out"), "out", ["out.partial"]),
    "convert to gguf": (("convert", "{source}/q", "--to", "gguf", "-o", "{here}/m.gguf"), "m.gguf", ["m.gguf.partial"]),
    "search": (
        (*SEARCH, "-o", "{here}/r.yaml", "--checkpoint", "{here}/out"),
        "out",
        ["r.yaml.partial", "r.yaml.search", "out.partial"],
    ),
}
PLACES = [(command, folder) for command, (_, _, folders) in COMMANDS.items() for folder in folders]


@pytest.fixture
def call(run, source, tmp_path):
    def command(name, *further):
        arguments = [part.format(source=source, here=tmp_path) for part in COMMANDS[name][0]]
        code, _, error = run(*arguments, *further)
        assert "Traceback" not in error
        return code, error

    return command


@pytest.mark.parametrize(("command", "folder"), PLACES)
def test_a_folder_of_the_users_where_a_command_would_work_is_kept(call, tmp_path, command, folder):
    (tmp_path / folder / "checkpoint").mkdir(parents=True)
    (tmp_path / folder / "checkpoint" / "thesis.txt").write_text("years")
    (tmp_path / folder / "state.json").write_text("{}")
    before = tree(tmp_path)
    for further in ([], ["--overwrite"], [] if "convert" in command else ["--no-resume"]):
        code, error = call(command, *further)
        assert code == 4
        assert f"{folder} as a work folder" in error
        assert tree(tmp_path) == before


@pytest.mark.parametrize(("command", "folder"), PLACES)
def test_a_link_where_a_command_would_work_is_refused(call, tmp_path, command, folder):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("years")
    (tmp_path / folder).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    code, error = call(command, "--overwrite")
    assert code == 4
    assert f"{folder} is a symbolic link" in error
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("command", "folder"), PLACES)
def test_a_second_run_is_refused_at_once(call, tmp_path, command, folder):
    with work_folder(tmp_path / folder, "search"):
        before = tree(tmp_path)
        code, error = call(command)
        assert code == 4
        assert f"another run is writing {tmp_path / folder}" in error
        assert tree(tmp_path) == before
    assert list(tmp_path.iterdir()) == []


PROJECT = {"config.json": "{}", "package.json": "{}", "model.safetensors": "x", ".git/HEAD": "ref", "src/main.js": "x"}
NOTES = {"config.json": "{}", "model.safetensors": "x", "notes.txt": "years"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("files", [PROJECT, NOTES], ids=["project", "notes"])
def test_overwrite_replaces_only_what_quantkit_wrote(call, tmp_path, command, files):
    output = COMMANDS[command][1]
    for name, text in files.items():
        (tmp_path / output / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / output / name).write_text(text)
    before = tree(tmp_path)
    code, error = call(command, "--overwrite")
    assert code == 4
    assert f"{output} " in error
    assert "so it is not replaced; move it away" in error
    assert tree(tmp_path) == before


def plant(folder: Path, output: str) -> None:
    """What older versions or other tools would have called their own, beside the output."""
    for name in (f".{output}.old", f".{output}.converting", f"{output}.codes", f"{output}.failed", f"{output}.search"):
        if name != "r.yaml.search":
            (folder / name / "checkpoint").mkdir(parents=True)
            (folder / name / "thesis.txt").write_text("years")
    (folder / f".{output}.tmp").write_text("a draft")
    (folder / f".{output}.link").symlink_to(folder / f".{output}.old")


def interrupt(monkeypatch, moment: int) -> None:
    """The n-th flush of a file is where the user presses Ctrl-C."""
    fsync, calls = os.fsync, []

    def flush(descriptor):
        calls.append(descriptor)
        if len(calls) == moment:
            raise KeyboardInterrupt
        return fsync(descriptor)

    monkeypatch.setattr(writer.os, "fsync", flush)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_lies_beside_an_output_is_the_same_after_everything(call, tmp_path, monkeypatch, command):
    _, output, folders = COMMANDS[command]
    for name in {output, "r.yaml"} if command == "search" else {output}:
        plant(tmp_path, name)
    before = tree(tmp_path)

    def beside():
        ours = {output, "r.yaml", *folders}
        return {name: content for name, content in tree(tmp_path).items() if name.split("/")[0] not in ours}

    for moment in (1, 4):
        interrupt(monkeypatch, moment)
        code, _ = call(command)
        monkeypatch.undo()
        assert code == 130
        assert beside() == before
        if (tmp_path / output).exists():  # the flush was the last
            break
    else:
        assert call(command)[0] == 0
    assert beside() == before
    assert call(command)[0] == 4  # taken
    assert call(command, "--overwrite")[0] == 0
    assert beside() == before
    assert [folder for folder in folders if (tmp_path / folder).exists()] == []


@pytest.mark.parametrize("command", [name for name, (_, output, _) in COMMANDS.items() if output == "out"])
def test_an_output_that_a_killed_replacement_moved_aside_is_put_back(call, tmp_path, command):
    assert call(command)[0] == 0
    before = tree(tmp_path / "out")
    child = os.fork()
    if child == 0:
        with work_folder(tmp_path / "out.partial", command, resumable=command == "quantize") as work:
            (tmp_path / "out").rename(work.replaced)
            work.checkpoint.mkdir()
            os._exit(9)
    os.waitpid(child, 0)
    assert not (tmp_path / "out").exists()
    (tmp_path / "r.yaml").unlink(missing_ok=True)
    assert call(command)[0] == 4
    assert tree(tmp_path / "out") == before
    assert call(command, "--overwrite")[0] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "r.yaml"] == ["out"]


@pytest.fixture(scope="module")
def report_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(make_report(), folder)
    return folder


@pytest.fixture
def verified(report_files, tmp_path):
    return Path(shutil.copytree(report_files, tmp_path / "v"))


@pytest.mark.slow
def test_a_page_replaces_nothing_unless_it_is_one_and_asked_for(run, verified, tmp_path):
    page, note, link = tmp_path / "page.html", tmp_path / "note.html", tmp_path / "link.html"
    note.write_text("<p>my own</p>")
    link.symlink_to(verified / "report.html")
    assert run("report", verified, "-o", page)[0] == 0
    before = tree(tmp_path)
    for path, flags, reason in [
        (page, (), "exists already; choose another --output or pass --overwrite"),
        (note, (), "exists already"),
        (note, ("--overwrite",), "was not written by quantkit, so it is not replaced"),
        (link, ("--overwrite",), "is not a regular file"),
        (verified, ("--overwrite",), "is not a regular file"),
    ]:
        for reports in ([verified], [verified, verified]):
            code, _, error = run("report", *reports, "-o", path, *flags)
            assert (code, error.count("\n")) == (4, 1)
            assert reason in error
    assert tree(tmp_path) == before
    assert run("report", verified, verified, "-o", page, "--overwrite")[0] == 0
    assert "Checkpoints compared" in page.read_text()


@pytest.mark.parametrize("name", SIGNS)
def test_verify_replaces_only_its_own_files(run, source, verified, name):
    check_output(verified)  # all four are ours
    (verified / name).write_text("my own")
    before = tree(verified)
    arguments = ("--baseline", source / "m", "--text", source / "text.txt", "--suite", "none", "--no-bench")
    code, _, error = run("verify", source / "q", *arguments, "-o", verified)
    assert (code, error.count("\n")) == (4, 1)
    assert f"{verified / name} was not written by quantkit" in error
    assert tree(verified) == before


VERIFY = ("verify", "{source}/q", "--baseline", "{source}/m", "--text", "{source}/text.txt", "--suite", "none")
AT_ONCE = {
    **{command: (arguments, [output]) for command, (arguments, output, _) in COMMANDS.items()},
    "search": (COMMANDS["search"][0], ["out", "r.yaml"]),
    "report": (("report", "{here}/v", "-o", "{here}/page.html"), ["page.html", "v"]),
    "verify": ((*VERIFY, "--no-bench", "--no-sensitivity", "--gate", "kl<=1000", "-o", "{here}/out"), ["out"]),
}


@pytest.mark.parametrize("command", AT_ONCE)
def test_of_two_at_once_one_is_refused_and_the_other_whole(source, report_files, tmp_path, command):
    arguments, outputs = AT_ONCE[command]
    if command == "report":
        shutil.copytree(report_files, tmp_path / "v")
    given = [part.format(source=source, here=tmp_path) for part in arguments]
    both = [forked.Command(*given) for _ in range(2)]
    codes, _, errors = zip(*(started.finish() for started in both), strict=True)
    if command == "verify":  # which replaces its own files, one after the other
        assert codes == (0, 0), errors
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(SIGNS)
        read_report(tmp_path / "out")
    else:
        assert sorted(codes) == [0, 4], errors
        assert any("another run is writing" in error or "exists already" in error for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == outputs
    if (tmp_path / "out" / "config.json").exists():
        assert inspect(tmp_path / "out").num_bytes > 0


def test_a_conversion_of_a_strangers_checkpoint_is_known_as_ours(call, source, tmp_path, run):
    """Its quantkit.json says no more than that; what reads such files copes."""
    stranger = shutil.copytree(source / "q", tmp_path / "stranger", ignore=shutil.ignore_patterns("quantkit*"))
    for further in ([], ["--overwrite"]):
        code, _, error = run("convert", stranger, "--to", "awq", "-o", tmp_path / "out", *further)
        assert code == 0, error
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    files = manifest.pop("files")
    assert files.keys() == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert manifest == {"result": {"format": "awq"}, "schema_version": 2, "converted_from": "gptq"}
    assert inspect(tmp_path / "out").layers == ()
    pair = check_pair(tmp_path / "out", source / "m")
    assert (pair.gates, pair.ignored, pair.notes) == ((), (), ())


def test_a_run_that_another_one_overtakes_refuses_to_write(tmp_path, source, run):
    with open_stage(tmp_path / "out", "convert", overwrite=False):
        code, _, error = run(*(part.format(source=source) for part in ROUND), tmp_path / "out")
    assert code == 4
    assert "another run is writing" in error
