"""Work folders and the outputs made in them: whose they are, who may write, and what a kill at any moment leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantkit.errors import OutputError
from quantkit.output.staging import check_gguf, check_regular, open_stage
from quantkit.output.work_folder import MARKER, work_folder
from tests import forked
from tests.helpers import tree

OTHER = os.getuid() or 20001  # a user who is not root
MANIFEST = {"schema_version": 1, "converted_from": "gptq"}


def make_checkpoint(path: Path, content: str = "old", **files: str) -> Path:
    path.mkdir()
    (path / "quantkit.json").write_text(json.dumps(MANIFEST))
    for name, text in {"config.json": content, **files}.items():
        (path / name).write_text(text)
    return path


def write(output: Path, content: str = "new", *, overwrite: bool = False, **options) -> None:
    """What every command that makes a directory does."""
    with open_stage(output, "convert", overwrite=overwrite, **options) as stage:
        stage.promote(make_checkpoint(stage.work.checkpoint, content))


def content(output: Path) -> str:
    return (output / "config.json").read_text()


def test_an_output_gets_its_name_and_nothing_else_stays(tmp_path):
    write(tmp_path / "a" / "out")
    assert content(tmp_path / "a" / "out") == "new"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    assert (tmp_path / "a" / "out" / MARKER).exists() is False


def test_an_output_is_replaced_only_when_asked(tmp_path):
    make_checkpoint(tmp_path / "out")
    with pytest.raises(OutputError, match=r"exists already; choose another --output or pass --overwrite"):
        write(tmp_path / "out")
    assert content(tmp_path / "out") == "old"
    write(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "new"


# Whose folder it is

STRANGERS = {
    "a file of the user's": lambda folder: (folder.mkdir(), (folder / "thesis.txt").write_text("years")),
    "a run of 0.1.0": lambda folder: ((folder / "checkpoint").mkdir(parents=True), (folder / "lock").touch()),
    "a marker that is not ours": lambda folder: (folder.mkdir(), (folder / MARKER).write_text('{"kind": "convert"}')),
    "a marker that is no JSON": lambda folder: (folder.mkdir(), (folder / MARKER).write_text("mine")),
    "an empty marker beside a file": lambda folder: (
        folder.mkdir(),
        (folder / MARKER).touch(),
        (folder / "thesis.txt").write_text("years"),
    ),
    "a marker that is a link": lambda folder: (folder.mkdir(), (folder / MARKER).symlink_to("/etc/hostname")),
    "a marker that is a FIFO": lambda folder: (folder.mkdir(), os.mkfifo(folder / MARKER)),
    "a file": lambda folder: folder.write_text("years"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_folder_that_quantkit_did_not_make_is_refused_by_name(tmp_path, stranger):
    STRANGERS[stranger](tmp_path / "out.partial")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"out\.partial .*choose another --output"):
        write(tmp_path / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path, exists):
    if exists:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "thesis.txt").write_text("years")
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"out\.partial is a symbolic link"):
        write(tmp_path / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["checkpoint", "activations", "replaced", "checkpoint/model-00001-of-00002.safetensors"]
)
def test_a_link_inside_the_folder_is_refused(tmp_path, name):
    elsewhere = make_checkpoint(tmp_path / "elsewhere", "years")
    with work_folder(tmp_path / "out.partial", "convert") as work:
        (work.path / name).parent.mkdir(exist_ok=True)
        (work.path / name).symlink_to(elsewhere)
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=rf"out\.partial/{name} is a symbolic link"):
        write(tmp_path / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("mode", "whose", "refused"),
    [
        (0o41777, 0, True),  # /tmp
        (0o40777, 0, False),  # a folder of colleagues
        (0o41777, OTHER, False),  # who owns the folder around it may do anything there
    ],
)
def test_work_that_another_user_left_in_a_shared_folder_is_not_taken_over(tmp_path, monkeypatch, mode, whose, refused):
    with work_folder(tmp_path / "out.partial", "quantize") as work:
        (work.path / "progress.json").write_text("{}")
    if os.getuid() == 0:
        os.chown(tmp_path / "out.partial", OTHER, -1)
    real = Path.stat
    shared = SimpleNamespace(st_mode=mode, st_uid=whose)
    monkeypatch.setattr(Path, "stat", lambda self, **how: shared if self == tmp_path else real(self, **how))
    monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)
    if refused:
        with pytest.raises(OutputError, match=f"another user .uid {OTHER}.*choose another --output"):
            work_folder(tmp_path / "out.partial", "quantize").__enter__()
    else:
        with work_folder(tmp_path / "out.partial", "quantize") as work:
            assert work.known["kind"] == "quantize"


def test_an_empty_folder_is_adopted(tmp_path):
    (tmp_path / "out.partial").mkdir()
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_was_killed_before_it_wrote_its_marker_is_no_obstacle(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / MARKER).touch()
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_another_command_can_resume_is_not_deleted(tmp_path):
    with open_stage(tmp_path / "out", "quantize", overwrite=False, resumable=True) as stage:
        (stage.work.path / "progress.json").write_text("{}")
    with pytest.raises(OutputError, match=r"out\.partial belongs to an interrupted `quantkit quantize`"):
        write(tmp_path / "out")
    assert (tmp_path / "out.partial" / "progress.json").exists()
    with open_stage(tmp_path / "out", "quantize", overwrite=False, resumable=True) as stage:
        assert (stage.work.path / "progress.json").exists()
        stage.work.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_the_user_chose_stays_when_nothing_came_of_it(tmp_path):
    (tmp_path / "mine").mkdir()
    with work_folder(tmp_path / "mine", "search", option="--work"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


# Whose output it is

KEPT = {
    "a project of node": {"config.json": "{}", ".git/HEAD": "ref", "model.safetensors": "x"},
    "weights and notes": {"config.json": "{}", "model.safetensors": "x", "notes.txt": "years"},
    "ours with notes": {"quantkit.json": json.dumps(MANIFEST), "config.json": "{}", "notes.txt": "years"},
    "ours under version control": {"quantkit.json": json.dumps(MANIFEST), "config.json": "{}", ".git/HEAD": "ref"},
    "another file of that name": {"quantkit.json": '{"dependencies": {}}', "config.json": "{}"},
    "a manifest that is a list": {"quantkit.json": "[1]", "config.json": "{}"},
    "weights that are not a shard of ours": {"quantkit.json": json.dumps(MANIFEST), "best.safetensors": "x"},
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_quantkit_did_not_write_is_not_replaced(tmp_path, kind):
    for name, text in KEPT[kind].items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"output .*out (has|holds) .*so it is not replaced; move it away"):
        write(tmp_path / "out", overwrite=True)
    assert tree(tmp_path) == before


def test_a_checkpoint_with_a_link_or_under_one_is_not_replaced(tmp_path):
    make_checkpoint(tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(OutputError, match="out is not a directory"):
        write(tmp_path / "out", overwrite=True)
    (tmp_path / "real" / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(OutputError, match=r"real holds tokenizer\.json, which quantkit did not write"):
        write(tmp_path / "real", overwrite=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "dangling")


def test_what_verify_and_the_hub_add_is_replaced_with_the_rest(tmp_path):
    names = ["README.md", "report.json", "report.html", "junit.xml", "quantkit-run.json", "tokenizer.json", "LICENSE"]
    make_checkpoint(tmp_path / "out", **dict.fromkeys(names, "x"))
    write(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "new"


def write_file(output: Path, check) -> None:
    with open_stage(output, "convert", overwrite=True, check=check) as stage:
        (stage.work.path / output.name).write_bytes(b"GGUF new")
        stage.promote(stage.work.path / output.name)


@pytest.mark.parametrize("check", [check_gguf, check_regular])
def test_a_file_replaces_only_its_kind(tmp_path, check):
    output = tmp_path / "m.gguf"
    output.write_bytes(b"GGUF old")
    write_file(output, check)
    assert output.read_bytes() == b"GGUF new"
    (tmp_path / "link").symlink_to(output)
    make_checkpoint(tmp_path / "folder")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "folder", "fifo"):
        with pytest.raises(OutputError, match=f"{name} is not a regular file"):
            write_file(tmp_path / name, check)
    if check is check_gguf:
        (tmp_path / "letter").write_text("dear")
        with pytest.raises(OutputError, match="letter is not a GGUF file"):
            write_file(tmp_path / "letter", check)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == []


@pytest.mark.parametrize("output", [".", "..", "a/..", "/"])
def test_an_output_without_a_name_is_refused(output):
    with pytest.raises(OutputError, match="has no file name"):
        write(Path(output))


# One writer at a time


def test_a_second_run_is_refused_at_once(tmp_path):
    with open_stage(tmp_path / "out", "quantize", overwrite=False, resumable=True) as stage:
        with pytest.raises(OutputError, match=r"another run is writing .*out\.partial"):
            write(tmp_path / "out")
        stage.promote(make_checkpoint(stage.work.checkpoint))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def race(folder: Path) -> None:
    inside, entered = folder / "inside", 0
    while entered < 20:
        try:
            with work_folder(folder / "w.partial", "convert", output=Path("w"), resumable=False) as work:
                inside.mkdir()  # fails if anybody else is inside
                (work.path / "file").touch()
                inside.rmdir()
            entered += 1
        except OutputError as error:
            assert "another run is writing" in str(error), error
            os.sched_yield()  # otherwise a busy machine may never run the one that is inside


def test_no_two_are_ever_inside_though_the_folder_comes_and_goes(tmp_path):
    runs = [forked.start(race, tmp_path) for _ in range(3)]
    for run in runs:
        run.join(120)
        assert run.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_folder_was_taken_away_touches_nothing(tmp_path):
    with open_stage(tmp_path / "out", "convert", overwrite=False) as stage:
        make_checkpoint(stage.work.checkpoint)
        stage.work.path.rename(tmp_path / "elsewhere")
        with open_stage(tmp_path / "out", "convert", overwrite=False) as other:
            make_checkpoint(other.work.checkpoint, "theirs")
            with pytest.raises(OutputError, match=r"out\.partial was removed during this run"):
                stage.promote(stage.work.checkpoint)
            assert content(other.work.checkpoint) == "theirs"


# Killed and failing

STEPS = ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir"))
STEPS += ((os, "ftruncate"), (os, "pwrite"), (os, "unlink"), (os, "rmdir"))


def killed(output: Path, moment: int) -> bool:
    """Replace an output in a child that ends, without any cleaning up, at the n-th change; False if it got through."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(function):
            def call(*args, **options):
                nonlocal count
                count += 1
                if count == moment:
                    os._exit(9)
                return function(*args, **options)

            return call

        for owner, name in STEPS:
            setattr(owner, name, counted(getattr(owner, name)))
        write(output, overwrite=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_kill_at_any_step_loses_neither_the_old_nor_the_new(tmp_path, refused_first):
    """Before every rename, removal and marker; the next run finds one of the two, whole."""
    for moment in range(1, 100):
        output = tmp_path / str(moment) / "out"
        output.parent.mkdir()
        make_checkpoint(output)
        if not killed(output, moment):
            break
        if refused_first:
            with pytest.raises(OutputError, match="exists already"):
                write(output)
            assert content(output) in ("old", "new")
        elif output.exists():
            assert content(output) in ("old", "new")
        write(output, "newer", overwrite=True)
        assert content(output) == "newer"
        assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert moment > 10


def killed_between_renames(output: Path) -> None:
    """What `os._exit` leaves between moving the old output aside and naming the new one."""
    with work_folder(output.with_name("out.partial"), "quantize") as work:
        output.rename(work.replaced)
        make_checkpoint(work.checkpoint, "new")


def test_what_was_moved_aside_comes_back_also_for_another_command(tmp_path):
    make_checkpoint(tmp_path / "out")
    killed_between_renames(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="interrupted `quantkit quantize`"):
        write(tmp_path / "out")
    assert content(tmp_path / "out") == "old"


def test_what_was_moved_aside_is_kept_when_its_place_is_taken(tmp_path):
    make_checkpoint(tmp_path / "out")
    killed_between_renames(tmp_path / "out")
    make_checkpoint(tmp_path / "out", "the user's")
    with pytest.raises(OutputError, match=r"interrupted run moved the old .*out to .*replaced, but"):
        write(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "the user's"
    assert content(tmp_path / "out.partial" / "replaced") == "old"


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), KeyboardInterrupt()])
@pytest.mark.parametrize("resumable", [True, False])
def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path, monkeypatch, error, resumable):
    make_checkpoint(tmp_path / "out")
    rename = Path.rename

    def failing(self, target):
        if self.name == "checkpoint":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        write(tmp_path / "out", overwrite=True, resumable=resumable)
    assert content(tmp_path / "out") == "old"
    assert (tmp_path / "out.partial").exists() == resumable


def test_a_failure_leaves_only_what_can_be_resumed(tmp_path):
    for resumable in (True, False):
        with (
            pytest.raises(ZeroDivisionError),
            open_stage(tmp_path / "out", "x", overwrite=False, resumable=resumable) as s,
        ):
            (s.work.path / "file").touch()
            raise ZeroDivisionError
        assert (tmp_path / "out.partial" / "file").exists() == resumable
        if resumable:
            with work_folder(tmp_path / "out.partial", "x") as work:
                work.clear()
    with pytest.raises(ZeroDivisionError), open_stage(tmp_path / "out", "x", overwrite=False, resumable=True):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
