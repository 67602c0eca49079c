"""Suites: which tasks, texts and long-context lengths are one evaluation. One YAML each, in evals/suites.

A suite has two parts, because the demo model knows nothing but its own language: `demo` is what models of that
language are asked, `others` what all others are. Unknown keys are refused with the valid ones.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.demo import bundled_folder
from quantkit.errors import DataError, suggestion
from quantkit.safety.untrusted import parse_yaml, read_text, shorten

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
    """What one kind of model is asked.

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
        """What a model is asked."""
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
