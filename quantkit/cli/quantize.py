"""`quantkit quantize`: compress a model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli._options import RUN, Settings, launch_ranks, option_group, push_option, push_output, set_option
from quantkit.cli._output import Command, Output, explain
from quantkit.cli.verify import check_before, gate_option, verify_result
from quantkit.quantities import byte_size, counted, elapsed
from quantkit.report.table import Column, Table, facts
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.compress.recipe import Recipe
    from quantkit.results import CompressionResult


_RECIPES = "the recipe's"
_FIELDS: Settings = {
    "calibration.data": setting(
        None,
        "Calibration text: 'bundled', a .txt or .jsonl file, or hub:NAME[:CONFIG].",
        flag="--calibration NAME|FILE",
    ),
    "calibration.images": setting(
        None, "Calibration images: 'bundled', a folder, or a .jsonl file.", flag="--images NAME|DIR|FILE"
    ),
    "calibration.samples": setting(
        None, "Number of calibration sequences.", flag="--samples", minimum=1, shown=_RECIPES
    ),
    "calibration.sequence_length": setting(
        None, "Tokens per calibration sequence.", flag="--sequence-length", minimum=8, shown=_RECIPES
    ),
    "imatrix": setting(
        None,
        "Importance matrix from llama.cpp: how much an error in each input matters. It replaces calibration data.",
        flag="--imatrix FILE",
    ),
    "format": setting(None, "On-disk format of the result.", flag="--format NAME", shown=_RECIPES),
    "seed": setting(None, "Seed of all random choices.", flag="--seed", minimum=0, shown=_RECIPES),
}
_ACTIVATIONS = setting(
    "auto",
    "Where to keep hidden states between layers; auto = in memory if a GPU computes, otherwise on disk.",
    flag="--activations",
    choices=("auto", "ram", "disk"),
)
_NPROC = setting(
    1,
    "Number of processes on this machine that share the work; the result does not depend on this number.",
    flag="--nproc N",
    minimum=1,
)
_ENGINE = setting(
    None,
    "Engine that must be able to read the result, with its device if known: vllm, vllm:h100, vllm:cpu, sglang, "
    "transformers, llama.cpp, openvino, onnxruntime or tensorrt-llm. quantkit stops at once if the engine cannot "
    "read the result.",
    flag="--for ENGINE[:DEVICE]",
)

_ADAPTER = setting(
    (), "LoRA adapter to merge into MODEL before quantizing: a folder that PEFT has saved.", flag="--adapter DIR"
)


@click.command("quantize", cls=Command, short_help="Compress a model.")
@click.argument("model", required=False)
@click.option("--recipe", required=True, metavar="NAME|FILE", help="A shipped recipe or a .yaml file.")
@click.option("-o", "--output", metavar="DIR", help="Directory or .gguf file to create.  [default: ./<model>-<recipe>]")
@set_option
@option_group("fields", _FIELDS)
@option_group("how", {**RUN, "nproc": _NPROC, "activations": _ACTIVATIONS, "engine": _ENGINE, "adapter": _ADAPTER})
@push_option
@click.option("--verify", is_flag=True, help="Verify the result. If a gate fails, move it to DIR.failed; exit code 3.")
@gate_option
def command(
    output_to: Output,
    *,
    model: str | None,
    recipe: str,
    output: str | None,
    changes: tuple[str, ...],
    how: dict[str, Any],
    push_to_hub: str | None,
    verify: bool,
    gates: tuple[str, ...] | None,
    fields: dict[str, Any],
) -> None:
    """Compress MODEL, a directory or a hub id, to a new checkpoint; without MODEL, the bundled demo model.

    One decoder layer is in memory at a time. If a run is interrupted, the same command continues where it stopped.

    \b
    Examples:
      quantkit quantize --recipe awq-int4 --samples 16 -o demo-int4
      quantkit quantize --recipe rtn-int4 --set weights.group_size=32 -o demo-g32
      quantkit quantize --recipe gptq-int4 --samples 16 -o demo-gptq
      quantkit quantize --recipe w8a8-int8 --samples 16 --sequence-length 512
      quantkit quantize --recipe rtn-int4 --for vllm:h100 -o demo-vllm
      quantkit quantize --recipe awq-int4 --verify --gate "kl<=0.05" -o demo-safe
    """
    from quantkit import distributed
    from quantkit.machine.memory import importing, spare_memory

    if gates and not verify:
        raise click.UsageError("--gate has no effect without --verify; add --verify")
    how = _with_one_adapter(how)
    if (nproc := how.pop("nproc", 1)) > 1 and not distributed.is_launched():
        launch_ranks(nproc)
    with importing("torch"):
        import quantkit.compress.recipe  # noqa: F401
    with distributed.joined(explain):
        # Only one process reads the recipe, because all would report the same error at once.
        read: Any = _read(recipe, changes, fields, gates, verify) if distributed.is_writer() else None
        if not verify:  # these changes would also affect what verification measures
            spare_memory()
        result = _compressed(model, read, output, output_to, how)
    if result is None:
        return
    if verify:  # before the upload: a checkpoint that fails is not uploaded
        verify_result(output_to, result, model, gates, how, _summary(result))
    push_output(result.output, push_to_hub, model)
    if not verify:
        next_step = f"next: quantkit inspect {result.output}"
        output_to.result(result.to_dict(), _summary(result), _worst(result), next_step)


def _with_one_adapter(how: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a single adapter in place of a tuple.

    Raises:
        UsageError: several adapters are given.
    """
    if len(adapters := how.get("adapter", ())) > 1:
        raise click.UsageError(
            f"--adapter is given {len(adapters)} times, but quantkit merges one adapter; give --adapter once"
        )
    return {**how, "adapter": adapters[0]} if adapters else how


def _read(
    recipe: str, changes: tuple[str, ...], fields: dict[str, Any], gates: tuple[str, ...] | None, verify: bool
) -> Recipe:
    """Read the recipe with these changes; if the result is to be verified, check first that this is possible."""
    from quantkit.compress.recipe import load

    # Values are written as JSON, which YAML cannot misread: a file may be called `a: b`.
    read = load(recipe, [*changes, *(f"{path}={json.dumps(value)}" for path, value in fields.items())])
    if verify:
        check_before(read, gates)
    return read


def _compressed(
    model: str | None, recipe: Recipe, output: str | None, output_to: Output, how: dict[str, Any]
) -> CompressionResult | None:
    """Compress the model; return the result in the first process of several, and None in the others."""
    import quantkit.compress.pipeline as pipeline
    from quantkit import distributed
    from quantkit.cli._progress import listening

    # Broadcast only after every process has imported its modules.
    is_writer, recipe = distributed.is_writer(), distributed.broadcast(recipe)
    with listening(output_to if is_writer else replace(output_to, quiet=True)) as listener:
        result = pipeline.quantize(model, recipe, output, listener=listener, **how)
    return result if is_writer else None


def _summary(result: CompressionResult) -> Table:
    from quantkit.report.tables import storage_rows

    ratio = result.source_bytes / result.output_bytes if result.output_bytes else 0.0
    quantized = counted(result.num_quantized, "linear")
    layers = f"{result.num_layers}, with {quantized} quantized, {len(result.ignored)} ignored"
    if result.resumed_layers:
        layers += f"; {counted(result.resumed_layers, 'layer')} reused from an interrupted run"
    return facts(
        [
            ("model", result.model),
            ("adapter", result.adapter.describe() if result.adapter else None),
            ("recipe", f"{result.recipe} ({result.format})"),
            ("layers", layers),
            ("quantized", _share(result)),
            ("calibration", result.calibration.describe() if result.calibration else None),
            *storage_rows(result.bits_per_weight, result),
            ("size", f"{byte_size(result.source_bytes)} → {byte_size(result.output_bytes)} ({ratio:.2f}x smaller)"),
            ("time", _times(result)),
            ("peak memory", byte_size(result.peak_bytes)),
            ("output", result.output),
        ]
    )


def _share(result: CompressionResult) -> str | None:
    """Return the quantized share of the decoder's weights, and the largest kinds of unquantized modules."""
    if result.quantized_share is None:
        return None
    kinds = list(result.unquantized)
    others = ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more kinds" if len(kinds) > 3 else "")
    return f"{result.quantized_share:.1%} of the decoder's weights" + (f"; unquantized: {others}" if kinds else "")


def _times(result: CompressionResult) -> str:
    phases = sorted(result.seconds.items(), key=lambda pair: pair[1], reverse=True)
    total = elapsed(sum(result.seconds.values()))
    return f"{total}: " + ", ".join(f"{name} {elapsed(seconds)}" for name, seconds in phases)


def _worst(result: CompressionResult) -> Table | None:
    if not result.num_quantized:
        return None
    four = "{:.4f}".format
    return Table(
        title="worst linears by relative error, beside the error of round-to-nearest",
        columns=(*(Column("linear"), Column("weights"), Column("error", four), Column("rounded", four), Column("of")),),
        rows=tuple(
            # The part after the comma describes the activations, which this error does not include.
            (name, linear.scheme.partition(",")[0], linear.error, linear.rounding_error, linear.measure)
            for name, linear in result.worst_linears()
        ),
    )
