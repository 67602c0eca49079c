"""GPTQModel quantizes a model; methods gptq, awq and rtn, options those of its configuration."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTQConfig, RTNConfig
from job import read_job, report
from transformers import AutoTokenizer

CONFIGS: dict[str, Any] = {"gptq": GPTQConfig, "awq": AWQConfig, "rtn": RTNConfig}


def main() -> None:
    """Quantize and save."""
    job = read_job()
    options = {"offload_to_disk": False, **job.options}
    backend = BACKEND.AWQ_TORCH if job.method == "awq" else BACKEND.AUTO
    config = CONFIGS[job.method](bits=job.bits, group_size=job.group, sym=job.symmetric, device="cpu", **options)
    dtype = {} if job.dtype == "auto" else {"dtype": getattr(torch, job.dtype)}
    model = GPTQModel.load(job.model, config, **dtype)
    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job.samples]
    model.quantize(None if job.method == "rtn" else data, batch_size=1, backend=backend)
    model.save(job.output)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.output)
    report("gptqmodel")


if __name__ == "__main__":
    main()
