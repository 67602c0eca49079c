"""`quantkit generate`: stream text from the bundled runtime."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import engine_choice, option_group, runtime_options, settings_of
from quantkit.cli._output import Command, Output, plain_console
from quantkit.quantities import byte_size, duration
from quantkit.report.table import Table, facts, terminal_table
from quantkit.runtime.types import SamplingParams

if TYPE_CHECKING:
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.prompts import Prompts
    from quantkit.runtime.types import Completion
    from quantkit.runtime.vllm_engine import VllmLLM


@click.command("generate", cls=Command, short_help="Stream text from the bundled runtime.")
@click.argument("checkpoint", required=False)
@click.option("--prompt", required=True, metavar="TEXT", help="Prompt to continue; '-' reads it from stdin.")
@click.option("--chat", is_flag=True, help="Format the prompt as a user's message with the chat template.")
@click.option("--system", metavar="TEXT", help="System message before the prompt, with --chat.")
@option_group("sampling", settings_of(SamplingParams), shown={"seed": "0"})
@click.option("--stats", is_flag=True, help="Print TTFT, ITL, tokens/s and memory bandwidth on stderr.")
@runtime_options
@engine_choice
def command(
    output_to: Output,
    *,
    engine: dict[str, Any],
    checkpoint: str | None,
    prompt: str,
    chat: bool,
    system: str | None,
    stats: bool,
    sampling: dict[str, Any],
    vllm: dict[str, Any] | None,
) -> None:
    """Continue a prompt with CHECKPOINT, a directory or a hub id; without it, with the bundled demo model.

    Compressed and original models run in the same engine. Text appears on stdout as it is generated.

    \b
    Examples:
      quantkit generate --prompt "Once upon a time"
      quantkit generate demo-awq-int4 --prompt "Once upon a time" --stats
      quantkit generate demo-awq-int4 --prompt "The" --temperature 0.8 --seed 1
      quantkit generate demo-awq-int4 --prompt "The" --kv-cache int8
    """
    params = SamplingParams(**{"seed": 0, **sampling})  # bad values are refused before a model is loaded
    if system is not None and not chat:
        raise click.UsageError("--system needs a conversation; give --chat too")
    # Python puts surrogates in place of an argument's invalid bytes; fsencode restores the bytes that the shell gave.
    text = _text(sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not be able to encode every character
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.vllm_engine import VllmLLM

    with contextlib.ExitStack() as stack:
        llm: LLM | VllmLLM
        if vllm is None:
            llm = LLM(checkpoint, max_sequences=1, lazy=True, **engine)
        else:
            llm = stack.enter_context(VllmLLM(checkpoint, options=vllm, **engine))
        completion = _stream(llm, output_to, _encode(llm, text, system, chat), params)
        if stats or output_to.as_json:
            numbers = _numbers(llm, completion)
            if output_to.as_json:
                output_to.result(numbers)
            else:
                console = plain_console(stderr=True)
                console.print(terminal_table(_table(llm, numbers), console))


def _text(given: bytes) -> str:
    """Decode a text as UTF-8, independently of the locale."""
    from quantkit.errors import RequestError

    try:
        return given.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt is not UTF-8 ({error}); convert it, for instance with iconv -t utf-8") from None


def _encode(llm: Prompts, text: str, system: str | None, chat: bool) -> list[int]:
    if not chat:
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system else []
    return llm.encode_chat([*messages, {"role": "user", "content": text}])


def _stream(llm: LLM | VllmLLM, output_to: Output, prompt: list[int], params: SamplingParams) -> Completion:
    """Print pieces of text as they arrive; return the completion."""
    for chunk in llm.stream(prompt, params):
        if not output_to.as_json:
            click.echo(chunk.text, nl=False)
        if chunk.completion is not None:
            if not output_to.as_json:
                click.echo()
            return chunk.completion
    raise AssertionError("a stream ends with its completion")


def _numbers(llm: LLM | VllmLLM, completion: Completion) -> dict[str, Any]:
    """Return the numbers that --stats and --json show; vLLM does not report its memory and traffic."""
    from quantkit.benchmark.ceilings import memory_bandwidth
    from quantkit.results.statistics.summary import median
    from quantkit.runtime.vllm_engine import VllmLLM

    gap, mean = median(completion.timing.inter_token_s), completion.timing.tpot_s
    numbers = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(completion.prompt_token_ids),
        "new_tokens": len(completion.token_ids),
        "ttft_s": completion.timing.ttft_s,
        "itl_median_s": gap,
        "tokens_per_s": 1 / mean if mean else None,
    }
    if isinstance(llm, VllmLLM):
        return {**numbers, "engine": llm.engine_name, "kv_cache": llm.kv_type}
    counters = llm.stats()
    # The mean context while tokens were generated, because traffic grows linearly with the context.
    context = len(completion.prompt_token_ids) + len(completion.token_ids) / 2
    read = llm.model.stored_bytes + llm.model.adapters.num_bytes + context * llm.kv_bytes_per_token
    bandwidth = memory_bandwidth(llm.device)
    return {
        **numbers,
        "bytes_per_token": read,
        "memory_bytes_per_s": bandwidth,
        # With drafts, steps read the weights, but not once per token.
        "bandwidth_share": read / gap / bandwidth if gap and not counters["drafted_tokens"] else None,
        **counters,
    }


def _table(llm: LLM | VllmLLM, numbers: dict[str, Any]) -> Table:
    from quantkit.runtime.vllm_engine import VllmLLM

    gap = numbers["itl_median_s"]
    rows = [
        ("tokens", f"{numbers['prompt_tokens']} prompt, {numbers['new_tokens']} new"),
        ("TTFT", duration(numbers["ttft_s"])),
        ("ITL", f"{duration(gap)} (median), {numbers['tokens_per_s']:.1f} tokens/s (mean)" if gap else None),
    ]
    if isinstance(llm, VllmLLM):
        return facts([*rows, ("engine", numbers["engine"]), ("KV cache", numbers["kv_cache"])])
    if numbers["bandwidth_share"] is not None:
        rate = f"{numbers['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        share = f"{100 * numbers['bandwidth_share']:.0f} % of the measured bandwidth of {rate}"
        rows.append(("memory traffic", f"{byte_size(numbers['bytes_per_token'])} per token; {share}"))
    cache = f"{byte_size(numbers['kv_bytes'])}, {numbers['kv_tokens']:,} tokens, {numbers['kv_cache']}"
    return facts([*rows, ("weights", byte_size(numbers["weight_bytes"])), ("KV cache", cache), *llm.describe().items()])
