"""llm-compressor quantizes a model; methods rtn, gptq, awq and awq+gptq, options observer, inputs, scheme."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from job import Job, read_job, report
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize and save."""
    job = read_job()
    if not torch.accelerator.is_available():  # 0.14.0.1 pins memory for AWQ in any case, which fails here
        from llmcompressor.pipelines.cache import IntermediatesCache

        IntermediatesCache.pin_memory = lambda self, *arguments, **named: None
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype, device_map="cpu")
    given: dict[str, Any] = {}
    if job.method != "rtn":
        samples = job.samples
        columns = {"input_ids": samples, "attention_mask": [[1] * len(sample) for sample in samples]}
        given = {"dataset": Dataset.from_dict(columns), "num_calibration_samples": len(samples)}
        given["max_seq_length"] = len(samples[0])
    oneshot(model=model, recipe=modifiers(job), **given)
    model.save_pretrained(job.output, save_compressed=True)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.output)
    report("llmcompressor", "compressed-tensors")


def modifiers(job: Job) -> list[Any]:
    """Steps of the method."""
    common: dict[str, Any] = {"ignore": ["lm_head"], "weight_observer": job.options.get("observer")}
    if "scheme" in job.options:  # a preset such as NVFP4A16
        common |= {"targets": "Linear", "scheme": job.options["scheme"]}
    else:
        common["config_groups"] = {"group_0": own_scheme(job)}
    rounding = GPTQModifier(**common) if job.method.endswith("gptq") else QuantizationModifier(**common)
    if not job.method.startswith("awq"):
        return [rounding]
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return [AWQModifier(), rounding]


def own_scheme(job: Job) -> QuantizationScheme:
    """Integers in groups or per channel."""
    channel = job.group < 0
    weights = QuantizationArgs(
        num_bits=job.bits,
        type="int",
        symmetric=job.symmetric,
        strategy="channel" if channel else "group",
        group_size=None if channel else job.group,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    if job.options.get("inputs") == "int8":
        scheme.input_activations = QuantizationArgs(
            num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True, observer=None
        )
    return scheme


if __name__ == "__main__":
    main()
