"""`quantkit plan`: estimate the memory and the best possible speed of a model, before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import Settings, option_group, set_option, settings_of
from quantkit.cli._output import Command, Output
from quantkit.quantities import (
    byte_size,
    duration,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_tokens,
    scaled_count,
    short,
)
from quantkit.report.table import Column, Table, facts
from quantkit.runtime.cache import policies
from quantkit.runtime.config import EngineConfig
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.planning import Estimate
_DEVICE: Settings = {
    "name": setting(
        None,
        "Device (h200, h100, a100, l40s, 4090, ...) to plan for: what fits on it, and how fast it could be.",
        flag="--device NAME",
    ),
    "memory_bytes": setting(
        None,
        "Memory to plan for, such as 24GiB; with --device, it replaces the device's memory.",
        flag="--memory SIZE",
        read=parse_bytes,
    ),
    "bandwidth": setting(
        None,
        "Measured bandwidth, such as 4.3TB/s, instead of the data sheet's.",
        flag="--bandwidth RATE",
        read=parse_rate,
    ),
    "peak": setting(
        None,
        "Measured 16-bit peak, such as 780TFLOP/s, instead of the data sheet's.",
        flag="--peak RATE",
        read=parse_flops,
    ),
}
_ESTIMATE: Settings = {
    "shape_file": setting(
        None, "YAML or JSON file with sizes named as in a config.json, instead of MODEL.", flag="--shape FILE"
    ),
    "params": setting(
        None,
        "Number of parameters, instead of MODEL: 7B, or 30B-A3B if each token uses 3 billion of 30 billion.",
        flag="--params NUMBER",
    ),
    "recipe": setting(
        None, "Plan this recipe; without --recipe, compare the usual number types.", flag="--recipe NAME|FILE"
    ),
    "context": setting(
        None,
        "Tokens per sequence, such as 32k.",
        flag="--context TOKENS",
        read=parse_tokens,
        shown="4096 or the model's",
    ),
    "batch": setting(1, "Number of sequences computed together.", flag="--batch", minimum=1),
    "prompt": setting(
        None,
        "Number of prompt tokens for the prefill time.",
        flag="--prompt TOKENS",
        read=parse_tokens,
        shown="the context",
    ),
    "kv_cache": setting(
        None,
        "Number type of keys and values, as in `generate`; without --kv-cache, compare bf16, fp8, int8 and int4.",
        flag="--kv-cache TYPE",
    ),
    **settings_of(EngineConfig, "kv_budget", "kv_policy"),
    "head": setting(
        None, "Number type to which the output head is quantized at load: int8 or int4.", flag="--head TYPE"
    ),
    "engine": setting(
        None,
        (
            "Engine that must read the recipe's result: vllm, vllm:cpu, sglang, transformers, ...; without --engine, "
            "list all."
        ),
        flag="--engine NAME[:DEVICE]",
    ),
}


@click.command("plan", cls=Command, short_help="Predict memory, disk and the fastest possible speed of a model.")
@click.argument("model", required=False)
@option_group("sizes", _ESTIMATE)
@set_option
@option_group("device", _DEVICE)
def command(
    output_to: Output, *, model: str | None, device: dict[str, Any], sizes: dict[str, Any], changes: tuple[str, ...]
) -> None:
    """Estimate the memory and the best possible speed of MODEL from its shape; nothing is measured.

    MODEL is a directory, a config.json or a hub id; quantkit reads only the headers of weight files. Without MODEL, the
    bundled demo model is used. A floor is the minimum time of a step: the larger of bytes / bandwidth and operations /
    peak.

    \b
    Examples:
      quantkit plan
      quantkit plan --params 7B
      quantkit plan --recipe awq-int4 --device 4090
      quantkit plan --recipe w4a8-fp8 --engine vllm --device h100
      quantkit plan --params 70B --device h200 --json
      quantkit plan --memory 24GiB --bandwidth 900GB/s --context 512 --batch 8
    """
    from quantkit.errors import RecipeError
    from quantkit.planning import estimate, make_device, to_document

    if changes and "recipe" not in sizes:
        raise RecipeError("--set changes a field of a recipe; give --recipe too")
    planned = estimate(model, device=make_device(**device), overrides=changes, **sizes)
    tables = (_overview, _weights, _caches, _device, _compression, _engines, _footnote)
    output_to.result(to_document(planned), *(table(planned) for table in tables))


def _overview(plan: Estimate) -> Table:
    from quantkit.planning.limits import STEP_TOKENS
    from quantkit.planning.memory import mtp_bytes

    shape = plan.shape
    counted = f"counted from {'a ' if 'count' in shape.counted_from else ''}{shape.counted_from}"
    parameters = f"{scaled_count(shape.num_parameters)} ({shape.num_parameters:,})"
    if shape.active_parameters != shape.num_parameters:
        parameters += f", {scaled_count(shape.active_parameters)} per token"
    rows: list[tuple[str, str | None]] = [("model", f"{shape.name}, {counted}"), ("parameters", parameters)]
    if shape.mtp_parameters:
        schemes = plan.schemes if plan.recipe is not None else plan.schemes[:1]
        sizes = ", ".join(f"{byte_size(mtp_bytes(shape, scheme))} {scheme.name}" for scheme in schemes)
        number = f"{len(shape.mtp)}, " if shape.mtp else ""
        text = f"{number}{scaled_count(shape.mtp_parameters)} parameters in addition to those above"
        rows.append(("MTP heads", f"{text}; in files {sizes}; not counted in memory"))
    if shape.layers:
        rows += [
            ("attention", "; ".join(f"{count} x {kind}" for kind, count in shape.attention_kinds.items())),
            ("longest context", f"{shape.max_length:,} tokens" if shape.max_length else "unknown"),
            ("activations", f"{byte_size(plan.activations)}, an estimate for steps of {STEP_TOKENS} tokens"),
        ]
    if plan.eviction.budget is not None:
        policy = plan.eviction.policy or policies.DEFAULT
        rows.append(("kept in the cache", f"{plan.kept:,} tokens of each sequence of {plan.context:,}, {policy}"))
    if plan.device is not None:
        rows.append(("device", f"{plan.device.title}, {byte_size(plan.device.memory_bytes)}"))
    return facts([*rows, *(("note", remark) for remark in plan.remarks)])


def _weights(plan: Estimate) -> Table:
    first = next(row.size.memory_bytes for row in plan.weights if row.problem is None)
    rows: list[tuple[Any, ...]] = []
    for row in plan.weights:
        if row.problem is not None:
            rows.append((row.scheme.name, "", "", "", "", f"no: {row.problem}"))
            continue
        size = row.size
        name = f"{row.scheme.name} ({plan.shape.dtype})" if row.scheme.name == "as stored" else row.scheme.name
        share = f"{100 * size.memory_bytes / first:.0f} %"
        rows.append((name, size.bits_per_weight, size.memory_bytes / 1e9, size.memory_bytes, size.disk_bytes, share))
    numbers = Column("bits/weight", "{:.3f}".format), Column("GB", short), Column("memory", byte_size)
    columns = (Column("weights"), *numbers, Column("disk", byte_size), Column("% of original", str))
    return Table(columns=columns, rows=tuple(rows))


def _caches(plan: Estimate) -> Table | None:
    if not plan.caches:
        return None
    first = plan.caches[0].per_sequence
    sizes = Column(f"{plan.context:,} tokens", byte_size), Column(f"batch of {plan.batch}", byte_size)
    return Table(
        columns=(
            *(Column("KV cache"), Column("B/token", "{:,.0f}".format), *sizes),
            Column("compression", "{:.2f}".format),
        ),
        rows=tuple(
            (row.form.name, row.per_token, row.per_sequence, plan.batch * row.per_sequence, first / row.per_sequence)
            for row in plan.caches
        ),
    )


def _device(plan: Estimate) -> Table | None:
    if plan.device is None:
        return None
    titles = "batch", "context", "step", "tokens/s", "prefill"
    rows = []
    for row in plan.on_device:
        fits = (
            (_count(row.fit.largest_batch), _count(row.fit.largest_context)) if row.fit.fits else ("does not fit", "")
        )
        seconds = row.decode.seconds if row.decode is not None else 0.0
        speed = (duration(seconds), f"{plan.batch / seconds:,.0f}") if seconds else ("", "")
        prefill = "" if row.prefill is None else duration(row.prefill.seconds)
        rows.append((row.scheme.name, "" if row.form is None else row.form.name, *fits, *speed, prefill))
    columns = (Column("weights"), Column("KV cache"), *(Column(title, str) for title in titles))
    return Table(columns=columns, rows=tuple(rows))


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _compression(plan: Estimate) -> Table | None:
    recipe, parts = plan.recipe, plan.compression
    if recipe is None or parts is None:
        return None
    titles = {
        "layer": "weights of one layer",
        "hidden_states": f"hidden states of {recipe.num_tokens:,} tokens (on disk if a CPU computes)",
        "statistics": "statistics of the steps",
        "working_copies": "working copies",
        "libraries": "Python, torch and the tokenizer, about",
    }
    rows = [
        *((titles[key], size) for key, size in parts.items() if size),
        ("together", sum(parts.values())),
        ("disk for the result", plan.weights[-1].size.disk_bytes),
    ]
    columns = Column(f"compressing with {recipe.name}"), Column("memory", byte_size)
    return Table(columns=columns, rows=tuple(rows))


def _engines(plan: Estimate) -> Table | None:
    if plan.recipe is None:
        return None
    from quantkit.report.tables import engine_table

    return engine_table(f"who reads {plan.recipe.format}", plan.readings)


def _footnote(plan: Estimate) -> str:
    text = "Computed, not measured."
    device = plan.device
    if device is None:
        return f"{text} Give --device NAME or --memory SIZE to see what fits and how fast it could be."
    if plan.shape.layers:
        text += (
            f" batch: the maximum number of sequences of {plan.context:,} tokens that fit; context: the longest that "
            f"fits at batch {plan.batch}, up to the model's own limit. 5 % of the memory is kept in reserve."
        )
    rates = [f"{device.bandwidth / 1e12:.3g} TB/s"] if device.bandwidth else []
    rates += [f"{device.peaks['bf16'] / 1e12:.4g} TFLOP/s in 16 bits"] if device.peaks else []
    if not rates:
        return text
    return (
        f"{text} step: floor of a decode step of batch {plan.batch} at {plan.context:,} tokens; tokens/s: the speed at "
        f"this floor; prefill: floor for {plan.prompt:,} tokens. All assume {' and '.join(rates)}, without any loss. "
        "Good engines reach 55 to 85 % of this speed."
    )
