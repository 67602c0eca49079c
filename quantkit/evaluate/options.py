"""Options of an evaluation, without torch, so that `--help` is fast."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.quantities import parse_tokens
from quantkit.settings import setting

DEFAULT_TEXT_TOKENS = 20480
"""Default number of tokens of `--text`: ten windows of 2048, enough to compare two models window by window, in minutes
on a CPU.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOptions:
    """Tasks and texts of an evaluation, the same for a model and its original. Suite None or `none` = no suite."""

    suite: str | None = setting(
        None, "Set of tasks: quick, standard, long-context or none.", flag="--suite NAME|FILE", shown="quick"
    )
    tasks: tuple[str, ...] = setting(
        (), "Names of tasks of lm-eval or quantkit; repeatable.", flag="--tasks A,B", commas=True
    )
    include_path: tuple[Path, ...] = setting(
        (), "Folder with further lm-eval task files; repeatable.", flag="--include-path DIR", kind=Path
    )
    data: tuple[Path, ...] = setting(
        (),
        "Folder with task items and texts, e.g. DIR/hellaswag/validation.jsonl; repeatable.",
        flag="--data DIR",
        kind=Path,
    )
    limit: int | None = setting(
        None, "Maximum number of items per task.", flag="--limit", minimum=1, shown="the suite's, or all"
    )
    num_fewshot: int | None = setting(
        None, "Number of solved examples before each item.", flag="--few-shot", minimum=0, shown="the task's"
    )
    texts: tuple[str, ...] = setting((), "Measure the perplexity of this text; repeatable.", flag="--text FILE")
    text_tokens: int | str = setting(
        DEFAULT_TEXT_TOKENS,
        "Number of tokens to score at the beginning of --text, rounded up to whole windows; all = the whole text. "
        "`verify` compares distributions on at most 8k tokens.",
        flag="--text-tokens N|all",
        kind=str,
        shown="20k",
    )
    window: int | None = setting(
        None, "Number of tokens per window of --text.", flag="--window", minimum=2, shown="2048"
    )
    stride: int | None = setting(
        None,
        "Number of tokens from the start of one window of --text to the next.",
        flag="--stride",
        minimum=1,
        shown="the window",
    )
    through: tuple[str, ...] = setting(
        ("prefill",),
        "How to score --text: in prefills, or token by token in decode steps; repeatable.",
        flag="--through",
        choices=("prefill", "decode"),
    )
    behaviour: bool | None = setting(
        None,
        "Test whether a chat model's answers end, loop, call tools validly and have the requested form.",
        flag="--behaviour/--no-behaviour",
        shown="as the suite says",
    )
    prompts: Path | None = setting(
        None, "Prompts for the behaviour test, instead of the bundled prompts.", flag="--prompts FILE", kind=Path
    )
    chat_template: bool = setting(False, "Format prompts with the model's chat template.", flag="--chat")
    add_bos: bool | None = setting(
        None, "Put the begin-of-text token before each text.", flag="--bos/--no-bos", shown="the tokenizer's"
    )
    seed: int | None = setting(
        None,
        "Seed of the few-shot examples and of the long-context texts.",
        flag="--seed",
        minimum=0,
        shown="the suite's",
    )

    def __post_init__(self) -> None:
        if self.suite == "none":
            object.__setattr__(self, "suite", None)
        if self.text_tokens != "all":
            object.__setattr__(self, "text_tokens", parse_tokens(str(self.text_tokens), "text_tokens"))
