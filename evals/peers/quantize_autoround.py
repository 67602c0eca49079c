"""auto-round quantizes a model; methods signround, rtn, opt_rtn and awq, options iters, batch_size, format, scheme."""

from __future__ import annotations

from typing import Any

import torch
from auto_round import AutoRound
from job import read_job, report
from transformers import AutoModelForCausalLM, AutoTokenizer

METHODS: dict[str, dict[str, Any]] = {
    "signround": {},
    "rtn": {"iters": 0, "disable_opt_rtn": True},
    "opt_rtn": {"iters": 0, "disable_opt_rtn": False},
    "awq": {"alg_configs": ["awq", "rtn"]},
}


def main() -> None:
    """Quantize and save."""
    job = read_job()
    options = dict(job.options)
    # Its packed form: "fake" writes the weights as they were where the source is float32.
    form = options.pop("format", "auto_round:auto_gptq")
    options = {"scheme": "W4A16", "bits": job.bits, "group_size": job.group, "sym": job.symmetric} | options
    samples = torch.tensor(job.samples)
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples]
    quantizer = AutoRound(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype, device_map="cpu"),
        tokenizer=AutoTokenizer.from_pretrained(job.model),
        dataset=torch.utils.data.DataLoader(data, batch_size=1),  # in place of a data set of the hub
        seqlen=len(samples[0]),
        nsamples=len(samples),
        device_map="cpu",
        **METHODS[job.method],
        **options,
    )
    quantizer.quantize_and_save(job.output, format=form)
    report("auto-round")


if __name__ == "__main__":
    main()
