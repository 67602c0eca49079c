"""Task names to lm-eval tasks: the demo language's, templates over local items, a user's own, and all of lm-eval's.

A name is looked for in this order: the shipped demo tasks; `local_<name>` templates, also under the bare name when a
--data folder has the items; the user's --include-path; lm-eval's own list, whose items come from the hub.
"""

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.demo import bundled_folder, is_demo
from quantkit.errors import DataError, first_line, suggestion
from quantkit.evaluate.engine import Evaluated
from quantkit.evaluate.options import EvaluationOptions
from quantkit.safety.untrusted import MAX_TEXT_BYTES, parse_yaml, read_text, shorten

Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Part):
    """A text whose perplexity is measured.

    Args:
        text: `demo`, or a file below a --data folder.
        window, stride, max_windows: see `perplexity`.
        through: one or both paths.
    """

    text: str
    window: Count | None = None
    stride: Count | None = None
    max_windows: Count | None = None
    through: tuple[Literal["prefill", "decode"], ...] = ("prefill",)


class LongContext(_Part):
    """Retrieval over long contexts.

    Args:
        lengths, depths, samples: see `long_context`.
    """

    lengths: tuple[Count, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: Count = 10


class Asked(_Part):
    """Questions for one kind of model.

    Args:
        tasks: names, as for --tasks.
        limit: items per task; None = all.
        perplexity: texts.
        long_context: lengths and depths, or None.
    """

    tasks: tuple[str, ...] = ()
    limit: Count | None = None
    perplexity: tuple[Text, ...] = ()
    long_context: LongContext | None = None


class Suite(_Part):
    """A whole evaluation.

    Args:
        description: one sentence.
        demo: for models of the demo language.
        others: for all others.
        seed: of few-shot examples and long-context texts.
    """

    description: str
    demo: Asked
    others: Asked
    seed: int = 0

    def part(self, speaks_demo: bool) -> Asked:
        """Return the questions for a model."""
        return self.demo if speaks_demo else self.others


def suites() -> dict[str, Path]:
    """The shipped suites: file by name."""
    return {path.stem: path for path in sorted(bundled_folder("suites").glob("*.yaml"))}


def load_suite(name: str) -> Suite:
    """Read a suite.

    Args:
        name: a shipped name, or a .yaml file.
    Raises:
        DataError: no such suite, or a mistake in it; file, key, value and what is valid.
    """
    known = suites()
    path = known.get(name, Path(name))
    if not path.exists():
        raise DataError(f"unknown suite {name!r}{suggestion(name, known)}; shipped: {', '.join(known)}; or give a file")
    data: Any = parse_yaml(read_text(path, DataError), path.name, DataError)
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path.name}: {where}: {first['msg']} (found {shorten(first['input'])})") from None


LEDGERS = "demo/demo_recall.jsonl"
LEDGER_TEXT = "demo/demo_text.txt"


def speaks_demo(llm: Evaluated) -> bool:
    """Whether a model is of the demo language: the demo model, or whatever was made from it."""
    return is_demo(llm.path)


def find_items(pattern: str, folders: Sequence[Path]) -> list[str]:
    """Files of items, from the first folder that has any.

    Args:
        pattern: path below the folder; `*` stands for any name.
        folders: where to look, in order.
    """
    # Sorted: the order of glob depends on the file system, and items must be numbered alike everywhere.
    items = (sorted(map(str, folder.expanduser().glob(pattern))) for folder in folders)
    return next(filter(None, items), [])


def read_named_text(name: str, folders: Sequence[Path]) -> str:
    """A text to score.

    Args:
        name: `demo`, a file, or a path below one of the folders.
        folders: where to look, in order.
    Raises:
        DataError: there is no such file, or it is no UTF-8 text.
    """
    texts: list[str] = []
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a name that no file can have, or of nobody's home
        path = bundled_folder("tasks") / LEDGER_TEXT if name == "demo" else Path(name).expanduser()
        # glob raises for an absolute pattern instead of finding nothing.
        texts = [str(path)] if path.is_file() else [] if path.is_absolute() else find_items(name, folders)
    if not texts:
        looked = ", ".join(map(str, folders)) or "no --data folder was given"
        raise DataError(f"text {shorten(name, 300)} is no file here and not below --data ({looked}); pass --text FILE")
    return read_text(Path(texts[0]), DataError, MAX_TEXT_BYTES)


LOCAL = "local_"
BLIMP = "local_blimp_"


def load_tasks(names: Sequence[str], options: EvaluationOptions) -> list[Any]:
    """lm-eval's tasks and groups of these names.

    Args:
        names: see the module.
        options: whose folders of task files and of items count.
    Raises:
        DataError: a name is unknown (the nearest is suggested), a folder does not exist, or items cannot be had; says
            what to pass instead.
    """
    configs = check_tasks(names, options)
    foreign = [name for name, config in configs.items() if config is None]
    tasks = [_build(config) for config in configs.values() if config is not None]
    return tasks + (_load_foreign(foreign, options) if foreign else [])


def check_tasks(names: Sequence[str], options: EvaluationOptions) -> dict[str, dict[str, Any] | None]:
    """Refuse what can be refused without lm-eval and without a model.

    Returns:
        by name, in order: the definition of a task that is shipped, and None for what others have defined.
    Raises:
        DataError: a folder does not exist, or the items of a shipped task are not there.
    """
    for folder in (*options.include_path, *options.data):
        if not folder.expanduser().is_dir():
            raise DataError(f"{folder} is no directory; --data and --include-path name folders")
    ours = _shipped_files()
    demo = [task for task in ours if task.startswith("demo_")]
    configs: dict[str, dict[str, Any] | None] = {}
    for name in (task for given in names for task in (demo if given == "demo" else [given])):
        path = _own(name, ours, options.data)
        configs[name] = None if path is None else _own_config(name, path, options.data)
    return configs


def _shipped_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(bundled_folder("tasks").glob("*/*.yaml"))}


def _own(name: str, ours: dict[str, Path], data: Sequence[Path]) -> Path | None:
    """The shipped file of a name, or None."""
    if name in ours:
        return ours[name]
    if name.startswith(BLIMP):
        return ours["local_blimp"]
    if data and LOCAL + name in ours:
        return ours[LOCAL + name]
    if data and name.startswith("blimp_") and find_items(_blimp_items(name), data):
        return ours["local_blimp"]
    return None


def _blimp_items(name: str) -> str:
    return f"blimp/{name.removeprefix(LOCAL).removeprefix('blimp_')}.jsonl"


def _own_config(name: str, path: Path, data: Sequence[Path]) -> dict[str, Any]:
    """A shipped task with the absolute paths of its items."""
    config = _read_config(path)
    split, pattern = next(iter(config["dataset_kwargs"]["data_files"].items()))
    if path.parent.name == "demo":
        files = [str(path.parent / Path(pattern).name)]
    else:
        if path.stem == "local_blimp" and name.removeprefix(LOCAL) != "blimp":
            config["task"], pattern = LOCAL + name.removeprefix(LOCAL), _blimp_items(name)
        files = find_items(pattern, data)
    if not files:
        where = f"is not below {', '.join(map(str, data))}" if data else "needs a folder"
        raise DataError(f"task {name!r} reads {pattern}, which {where}; pass --data DIR with that file")
    config["dataset_kwargs"] = {"data_files": {split: files}}
    config.pop("tag", None)
    return config


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = parse_yaml(read_text(path, DataError), path.name, DataError)
    return config


def _build(config: dict[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    try:
        return ConfigurableTask(config=config)
    except Exception as error:  # datasets reports broken items in many classes
        files = next(iter(config["dataset_kwargs"]["data_files"].values()))
        raise DataError(
            f"task {config['task']!r}: its items cannot be read ({first_line(error)}); see {files[0]}"
        ) from error


def _load_foreign(names: list[str], options: EvaluationOptions) -> list[Any]:
    """Tasks of the user's folders and of lm-eval."""
    from lm_eval.tasks import TaskManager

    folders = tuple(str(folder.expanduser()) for folder in options.include_path)
    manager = TaskManager(include_path=list(folders), include_defaults=False) if folders else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = _all_of_lm_eval(folders)  # only then: reading lm-eval's own list takes seconds
    ours = _shipped_files()
    for name in names:
        if name not in manager.all_tasks:
            hint = suggestion(name, [*ours, "demo", *manager.all_tasks])
            raise DataError(f"unknown task {name!r}{hint}; `lm_eval ls tasks` lists lm-eval's, docs/evaluate.md ours")
    return [task for name in names for task in _load(manager, name, ours)]


@cache
def _all_of_lm_eval(folders: tuple[str, ...]) -> Any:
    """lm-eval's list of tasks with those of some folders; reading its 14,000 files takes seconds, so only once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders) or None)


def _load(manager: Any, name: str, ours: dict[str, Path]) -> list[Any]:
    try:
        loaded = manager.load([name])
    except Exception as error:  # the hub and its libraries fail in many classes
        template = LOCAL + name
        instead = "pass --data DIR with its items" if template in ours else "run it once where the hub can be reached"
        if template in ours:
            config = _read_config(ours[template])
            instead += f" ({next(iter(config['dataset_kwargs']['data_files'].values()))})"
        raise DataError(
            f"task {name!r}: its items cannot be fetched ({type(error).__name__}: {first_line(error).rstrip('.')}); "
            f"{instead}, or name a task whose items are here, such as demo_facts"
        ) from error
    groups = loaded["groups"]
    return [groups[name]] if name in groups else list(loaded["tasks"].values())
