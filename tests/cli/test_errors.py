"""How commands end: one line on stderr and an exit code, also where the streams themselves fail."""

from __future__ import annotations

import errno
import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from quantkit.cli import main
from quantkit.cli._output import Output, explain, say
from quantkit.compress import pipeline
from quantkit.errors import AuditError, ModelError, ResourceError

ROOT = Path(__file__).parents[2]


def piped(line: str) -> tuple[int, str]:
    """Exit code and stderr of a command line of bash, in which `quantkit` is this one."""
    script = f'quantkit() {{ {shlex.quote(sys.executable)} -m quantkit "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("quantkit --help | sleep 0; exit ${PIPESTATUS[0]}", 141, ""),
        ("quantkit plan --params 7B --json | sleep 0; exit ${PIPESTATUS[0]}", 141, ""),
        ("quantkit plan --params 7B > /dev/full", 5, "error: .*no space left.*\n"),
        ("quantkit plan --params 7B --json > /dev/full", 5, "error: .*no space left.*\n"),
        ("quantkit recipes bogus 2> /dev/full", 2, ""),
        ("quantkit plan --params 7B <&- >&- 2>&-", 0, ""),
        ("quantkit recipes bogus >&- 2>&-", 2, ""),
        ("ulimit -v 200000; quantkit inspect quantkit/demo/model", 5, "error: out of memory: .*\n"),
    ],
)
def test_streams_that_fail_and_too_little_memory_are_one_line_at_most(line, code, message):
    exit_code, error = piped(line)
    assert (exit_code, bool(re.fullmatch(message, error, flags=re.IGNORECASE))) == (code, True), error


@pytest.mark.slow
def test_progress_that_nobody_reads_ends_no_work(tmp_path):
    line = f"quantkit quantize --recipe rtn-int8 -o {tmp_path / 'out'}"
    assert piped(f"{line} 2>&1 >/dev/null | sleep 0; exit ${{PIPESTATUS[0]}}") == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def failing(monkeypatch, error: BaseException) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(pipeline, "quantize", fail)


def wrapped(error: BaseException) -> Exception:
    """What a library makes of an error while it is imported."""
    outer = RuntimeError("Failed to import the model; read this")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("config.json is missing"), 4, "error: config.json is missing"),
        (ResourceError("disk is full"), 5, "error: disk is full"),
        (AuditError("a tensor differs"), 1, "error: a tensor differs"),
        (KeyboardInterrupt(), 130, "error: interrupted; to continue quantize, search or distill, run"),
        (MemoryError("no"), 5, "error: out of memory: no; for compression, see `quantkit plan --recipe`"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 5, "error: out of memory: CUDA"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 5, "error: out of memory"),
        (RuntimeError("std::bad_alloc"), 5, "error: out of memory: std::bad_alloc"),
        (ImportError("libx.so: failed to map segment from shared object"), 5, "error: out of memory: libx.so"),
        (RuntimeError("can't start new thread"), 5, "error: out of memory: can't start new thread"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 5, "error: out of memory"),
        (wrapped(MemoryError("9 bytes")), 5, "error: out of memory: 9 bytes; for compression"),
        (ImportError("no module named x"), 1, "error: ImportError: no module named x; this is a bug"),
        (SystemError("lost"), 1, "error: SystemError: lost; this is a bug"),
        (OSError(errno.ENOSPC, "full", "/x/y"), 5, "error: no space left on the disk of /x/y"),
        (ValueError("two\nlines"), 1, "error: ValueError: two lines; this is a bug; run again with --verbose"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_error_is_one_line_and_an_exit_code(invoke, monkeypatch, error, code, text):
    failing(monkeypatch, error)
    answer = invoke("quantize", "--recipe", "rtn-int8")
    assert (answer.exit_code, answer.stdout) == (code, "")
    assert answer.stderr.strip().startswith(text)
    assert answer.stderr.strip().count("\n") == 0
    answer = invoke("quantize", "--recipe", "rtn-int8", "--json")
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == {"error": answer.stderr.strip().removeprefix("error: "), "exit_code": code}


def test_a_system_error_under_a_limit_of_memory_is_want_of_memory(monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (600 << 20, limit))
    assert explain(SystemError("error return without exception set"))[0] == 5


def test_verbose_shows_the_traceback(invoke, monkeypatch):
    failing(monkeypatch, ValueError("odd"))
    assert "Traceback" not in invoke("quantize", "--recipe", "rtn-int8").stderr
    answer = invoke("quantize", "--recipe", "rtn-int8", "--verbose")
    assert "Traceback" in answer.stderr
    assert "in fail" in answer.stderr
    assert answer.exit_code == 1


def test_an_unknown_command_is_explained_too():
    assert explain(click.UsageError("No such command 'x'.")) == (2, "No such command 'x'.")


def test_without_standalone_mode_errors_are_raised():
    with pytest.raises(click.UsageError):
        main(["nonsense"], standalone_mode=False)
    assert main(["recipes", "list", "--json"], standalone_mode=False) is None


def test_a_file_that_another_user_put_where_torch_keeps_its_cache_is_no_obstacle(tmp_path):
    place = f"TMPDIR={tmp_path} HOME={tmp_path} XDG_CACHE_HOME= USER=somebody LOGNAME=somebody"
    (tmp_path / "torchinductor_somebody").touch()
    code = (
        "import contextlib\n"
        "from quantkit.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "import torch._dynamo"  # as transformers does
    )
    assert piped(f"export {place}; {shlex.quote(sys.executable)} -c {shlex.quote(code)}") == (0, "")


def test_names_of_strangers_do_not_steer_the_terminal(capsys):
    Output(as_json=False, quiet=False).result({}, "a\x1b[2J\nb")
    say("c\x1b]0;title\x07")
    out, err = capsys.readouterr()
    assert out == "a\\x1b[2J\nb\n"
    assert err == "c\\x1b]0;title\\x07\n"
