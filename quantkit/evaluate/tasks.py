"""Find the lm-eval task of each task name: demo tasks, templates for local items, the user's tasks, and lm-eval's own.

A name is looked up in this order:

1. the demo tasks that quantkit ships;
2. templates `local_<name>`, which read items from a --data folder; `<name>` alone works too if a folder has the items;
3. the user's folders from --include-path;
4. lm-eval's own list, whose items come from the hub.
"""

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.demo import GENERAL_TEXT, bundled_folder, is_demo
from quantkit.errors import DataError, first_line, suggestion
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.perplexity import DEFAULT_WINDOW
from quantkit.safety.untrusted import MAX_TEXT_BYTES, parse_yaml, read_text, shorten

Count = Annotated[int, Field(ge=1)]
Depth = Annotated[float, Field(ge=0, le=1)]
Kind = Literal["passkey", "multikey", "multivalue", "variables", "words"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Part):
    """A text whose perplexity is measured.

    Args:
        text: `demo`, or a file in a --data folder.
        window, stride, max_windows: see `perplexity`.
        through: "prefill", "decode" or both; see `perplexity`.
    """

    text: str
    window: Count | None = None
    stride: Count | None = None
    max_windows: Count | None = None
    through: tuple[Literal["prefill", "decode"], ...] = ("prefill",)


class LongContext(_Part):
    """A test of retrieval from long contexts.

    Args:
        lengths: lengths of prompts in tokens; filler text is added up to each length.
        depths: relative positions, 0 to 1, at which a fact is placed in texts that have only one.
        samples: number of texts per length, and per depth if there is only one fact.
        kinds: kinds of texts, see `long_context`.
    """

    lengths: tuple[Count, ...]
    depths: Annotated[tuple[Depth, ...], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: Count = 10
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("passkey",)


class Behaviour(_Part):
    """Settings of a behaviour test: chat models answer prompts, and margins of their decisions are measured.

    Args:
        prompts: number of prompts, from the beginning of the set; None = all.
        seeds: number of answers to each prompt.
        max_tokens: maximum number of tokens of an answer.
    """

    prompts: Count | None = None
    seeds: Count = 2
    max_tokens: Count = 256


class Asked(_Part):
    """The tasks, texts and tests on which one kind of model is evaluated.

    Args:
        tasks: task names, as for --tasks.
        limit: items per task; None = all. After `sample`, it may be a share of the items, below 1.
        perplexity: texts whose perplexity is measured.
        long_context: test of retrieval from long contexts; None = no such test.
        behaviour: behaviour test; None = no such test.
    """

    tasks: tuple[str, ...] = ()
    limit: Count | None = None
    perplexity: tuple[Text, ...] = ()
    long_context: LongContext | None = None
    behaviour: Behaviour | None = None

    def sample(self, share: int) -> Self:
        """Return the same questions, but only the first 1 / `share` of each task's items and of each text's windows."""
        limit = 1 / share if self.limit is None else -(-self.limit // share)
        texts = [
            text if text.max_windows is None else text.model_copy(update={"max_windows": -(-text.max_windows // share)})
            for text in self.perplexity
        ]
        return self.model_copy(update={"limit": limit, "perplexity": tuple(texts)})


class Suite(_Part):
    """A named set of tasks and texts.

    Args:
        description: one sentence about the suite.
        demo: tasks and texts for models of the demo language.
        others: tasks and texts for all other models.
        seed: seed of few-shot examples and long-context texts.
    """

    description: str
    demo: Asked
    others: Asked
    seed: int = 0

    def part(self, speaks_demo: bool) -> Asked:
        """Return the tasks and texts for a model that speaks the demo language, or for any other model."""
        return self.demo if speaks_demo else self.others


def suites() -> dict[str, Path]:
    """Return the files of the shipped suites, keyed by suite name."""
    return {path.stem: path for path in sorted(bundled_folder("suites").glob("*.yaml"))}


def load_suite(name: str) -> Suite:
    """Read a suite from its YAML file.

    Args:
        name: name of a shipped suite, or path of a .yaml file.
    Raises:
        DataError: the suite does not exist, or its file has a mistake; the message gives file, key, value and valid
            values.
    """
    known = suites()
    path = known.get(name, Path(name))
    if not path.exists():
        raise DataError(
            f"unknown suite {name!r}{suggestion(name, known)}; give a .yaml file, or one of: {', '.join(known)}"
        )
    data: Any = parse_yaml(read_text(path, DataError), path.name, DataError)
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path.name}: {where}: {first['msg']} (found {shorten(first['input'])})") from None


LEDGERS = "demo/demo_recall.jsonl"
LEDGER_TEXT = "demo/demo_text.txt"
# Name of the bundled text that replaces a missing text of a suite. Calibration uses the same text.
GENERAL = "general.txt (calibration text)"


def speaks_demo(llm: Evaluated) -> bool:
    """Whether a model uses the demo language: the demo model, and models made from it."""
    return is_demo(llm.path)


def find_items(pattern: str, folders: Sequence[Path]) -> list[str]:
    """Return the files that match a pattern, from the first folder that has any; an empty list if none has.

    Args:
        pattern: path inside the folder; `*` matches any name.
        folders: folders to search, in order.
    """
    # Sorted: the order of glob depends on the file system, and items must have the same numbers on every machine.
    items = (sorted(map(str, folder.expanduser().glob(pattern))) for folder in folders)
    return next(filter(None, items), [])


def read_named_text(name: str, folders: Sequence[Path]) -> str:
    """Read a text to score.

    Args:
        name: `demo`, `GENERAL`, a file, or a path inside one of the folders.
        folders: folders to search, in order.
    Raises:
        DataError: there is no such file, or it is not UTF-8 text.
    """
    texts: list[str] = []
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no file can have this name, or `~user` is unknown
        bundled = {"demo": bundled_folder("tasks") / LEDGER_TEXT, GENERAL: GENERAL_TEXT}
        path = bundled.get(name) or Path(name).expanduser()
        # glob raises for an absolute pattern instead of finding nothing.
        texts = [str(path)] if path.is_file() else [] if path.is_absolute() else find_items(name, folders)
    if not texts:
        looked = ", ".join(map(str, folders)) or "no --data folder was given"
        raise DataError(
            f"text {shorten(name, 300)} is neither a file nor in a --data folder ({looked}); give an existing file"
        )
    return read_text(Path(texts[0]), DataError, MAX_TEXT_BYTES)


def available_text(name: str, folders: Sequence[Path]) -> str:
    """Return the name of a suite's text, or `GENERAL` if the text is in none of the folders."""
    try:
        read_named_text(name, folders)
    except DataError:
        return GENERAL
    return name


def questions_for(llm: Evaluated, options: EvaluationOptions) -> tuple[Asked, int, dict[str, str]]:
    """Return what the suite and the options ask of this model, the seed, and notes on what is left out or replaced."""
    suite = None if options.suite is None else load_suite(options.suite)
    part = Asked() if suite is None else suite.part(speaks_demo(llm))
    read: dict[str, Any] = {"window": options.window, "stride": options.stride, "through": options.through}
    if options.text_tokens != "all":
        stride = options.stride or min(options.window or DEFAULT_WINDOW, llm.capacity)
        read["max_windows"] = -(-int(options.text_tokens) // stride)
    texts = (Text.model_validate({"text": text, **read}) for text in options.texts)
    kept, left_out = part.perplexity, {}
    if not llm.scores_decode and any("decode" in text.through for text in kept):
        kept = tuple(text.model_copy(update={"through": ("prefill",)}) for text in kept if "prefill" in text.through)
        left_out = {"left out": "perplexity through decode, which vLLM does not support"}
    texts_of_suite = {text.text: available_text(text.text, options.data) for text in kept}
    kept = tuple(text.model_copy(update={"text": texts_of_suite[text.text]}) for text in kept)
    missing = [name for name, text in texts_of_suite.items() if text != name]
    if missing:
        left_out["text"] = f"{GENERAL}, because {', '.join(missing)} is in no --data folder; --text FILE reads your own"
    asked = Asked(
        tasks=tuple(dict.fromkeys((*part.tasks, *options.tasks))),
        limit=options.limit if options.limit is not None else part.limit,
        perplexity=(*kept, *texts),
        long_context=part.long_context,
        behaviour=_behaviour_part(part, options),
    )
    seed = 0 if suite is None else suite.seed
    return asked, seed if options.seed is None else options.seed, left_out


def _behaviour_part(part: Asked, options: EvaluationOptions) -> Behaviour | None:
    """Return the behaviour test: the suite's, or, if only an option asks for one, a test with all prompts.

    None if the test is switched off, or if neither the suite nor an option asks for one.
    """
    if options.behaviour is False:
        return None
    if options.prompts is not None:  # use all of the user's own prompts
        return (part.behaviour or Behaviour()).model_copy(update={"prompts": None})
    return part.behaviour or (Behaviour() if options.behaviour else None)


LOCAL = "local_"
BLIMP = "local_blimp_"


def load_tasks(names: Sequence[str], options: EvaluationOptions) -> list[Any]:
    """Return the lm-eval tasks and groups with these names.

    Args:
        names: task names; see the module's docstring.
        options: options with the folders of task files and items.
    Raises:
        DataError: a name is unknown (the message suggests the nearest), a folder does not exist, or items are not
            available (the message says what to pass).
    """
    configs = check_tasks(names, options)
    foreign = [name for name, config in configs.items() if config is None]
    tasks = [_build(config) for config in configs.values() if config is not None]
    return tasks + (_load_foreign(foreign, options) if foreign else [])


def check_tasks(names: Sequence[str], options: EvaluationOptions) -> dict[str, dict[str, Any] | None]:
    """Check everything about task names that needs neither lm-eval nor a model.

    Returns:
        Definitions of shipped tasks, None for other tasks; keyed by name, in order.
    Raises:
        DataError: a folder does not exist, or the items of a shipped task are missing.
    """
    for folder in (*options.include_path, *options.data):
        if not folder.expanduser().is_dir():
            raise DataError(f"{folder} is not a directory; --data and --include-path take directories")
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
    """Return the file in which quantkit defines a task; None if quantkit does not ship this task."""
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
    """Return the definition of a shipped task with the absolute paths of its items."""
    config = _read_config(path)
    split, pattern = next(iter(config["dataset_kwargs"]["data_files"].items()))
    if path.parent.name == "demo":
        files = [str(path.parent / Path(pattern).name)]
    else:
        if path.stem == "local_blimp" and name.removeprefix(LOCAL) != "blimp":
            config["task"], pattern = LOCAL + name.removeprefix(LOCAL), _blimp_items(name)
        files = find_items(pattern, data)
    if not files:
        where = f"which is not in {', '.join(map(str, data))}" if data else "but no --data folder was given"
        raise DataError(f"task {name!r} reads {pattern}, {where}; pass --data DIR with that file")
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
    except Exception as error:  # `datasets` raises many classes of errors for broken items
        files = next(iter(config["dataset_kwargs"]["data_files"].values()))
        raise DataError(
            f"task {config['task']!r}: its items cannot be read ({first_line(error)}); see {files[0]}"
        ) from error


def _load_foreign(names: list[str], options: EvaluationOptions) -> list[Any]:
    """Return tasks from the user's folders and from lm-eval."""
    from lm_eval.tasks import TaskManager

    folders = tuple(str(folder.expanduser()) for folder in options.include_path)
    manager = TaskManager(include_path=list(folders), include_defaults=False) if folders else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = _all_of_lm_eval(folders)  # only then: reading lm-eval's own list takes seconds
    ours = _shipped_files()
    for name in names:
        if name not in manager.all_tasks:
            hint = suggestion(name, [*ours, "demo", *manager.all_tasks])
            raise DataError(
                f"unknown task {name!r}{hint}; `lm_eval ls tasks` lists lm-eval's tasks, and docs/evaluate.md lists "
                "quantkit's tasks"
            )
    return [task for name in names for task in _load(manager, name, ours)]


@cache
def _all_of_lm_eval(folders: tuple[str, ...]) -> Any:
    """Return lm-eval's tasks and those in these folders; cached, because reading lm-eval's files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders) or None)


def _load(manager: Any, name: str, ours: dict[str, Path]) -> list[Any]:
    try:
        loaded = manager.load([name])
    except Exception as error:  # the hub and its libraries raise many classes of errors
        template = LOCAL + name
        instead = "pass --data DIR with these items" if template in ours else "run it once with access to the hub"
        if template in ours:
            config = _read_config(ours[template])
            instead += f" ({next(iter(config['dataset_kwargs']['data_files'].values()))})"
        raise DataError(
            f"task {name!r}: its items cannot be downloaded ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); {instead}; with --suite none, verify and eval skip the suite's tasks"
        ) from error
    groups = loaded["groups"]
    return [groups[name]] if name in groups else list(loaded["tasks"].values())
