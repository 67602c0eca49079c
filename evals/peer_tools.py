"""The tools that we compare with: their packages and scripts, and the Pythons of their environments.

How the environments are made: evals/peers/job.py. quantkit does not import the tools.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import whole_path

LLM_COMPRESSOR, GPTQ_MODEL, AUTO_ROUND = "llm-compressor", "GPTQModel", "auto-round"
SCRIPTS = Path(__file__).resolve().parent / "peers"
TOOLS = {  # package, script
    LLM_COMPRESSOR: ("llmcompressor", SCRIPTS / "quantize_llmcompressor.py"),
    GPTQ_MODEL: ("gptqmodel", SCRIPTS / "quantize_gptqmodel.py"),
    AUTO_ROUND: ("auto-round", SCRIPTS / "quantize_autoround.py"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for the Python of each tool."""
    for tool in TOOLS:
        name, text = f"--{tool.lower()}", f"of an environment with {tool}"
        parser.add_argument(name, dest=tool, metavar="PYTHON", type=whole_path, help=text)


def pythons_of(args: argparse.Namespace) -> dict[str, str]:
    """The Pythons that were given, by tool."""
    return {tool: getattr(args, tool) for tool in TOOLS if getattr(args, tool)}


def job_command(tool: str, python: str, job: Mapping[str, Any]) -> list[str]:
    """What does a job, see evals/peers/job.py."""
    return [python, "-W", "ignore", str(TOOLS[tool][1]), json.dumps(job)]
