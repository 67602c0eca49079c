"""Whether a searched recipe of the demo model beats every uniform one of its size, on text that neither has seen.

    python evals/checks/search_beats_uniform.py [--bits 4.5] [--samples 64] [--work DIR] [--quick]

Searches at --bits, compresses by the recipe through `quantkit quantize`, unchanged, and by uniform recipes of at least
that size: int4 in groups of 32 and 16, with and without zero points, by plain rounding, AWQ, GPTQ and both, and int5.
KL to the original per window of new text in the demo language; paired over windows, Student's t and a bootstrap.
The next wider number type, int5, is listed beside them: one bit more for everything is outside of what a search at
4.5 bits can make up for. Exit code 1 when a 4-bit recipe is not beaten, or the prediction is off by more than 25 %.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from make_tasks import calibration_text

import quantkit
from quantkit.evaluate.engine import load_llm
from quantkit.evaluate.fidelity import Windows, fixed_windows
from quantkit.evaluate.sensitivity import Probe
from quantkit.results.statistics.paired import compare_pairs
from quantkit.runtime.llm import LLM

STEPS = {"rtn": [], "awq": ["awq"], "gptq": ["gptq"], "awq+gptq": [{"awq": {"clip": False}}, "gptq"]}
TOLERANCE = 0.25


def uniform_recipes(quick: bool) -> Iterator[tuple[str, dict[str, object], bool]]:
    """Name, changes to gptq-int4, and whether the search has to beat it."""
    for group in (32,) if quick else (32, 16):
        for symmetric in (True, False):
            for method, steps in STEPS.items():
                if quick and method != "gptq":
                    continue
                changes = {"weights.group_size": group, "weights.symmetric": symmetric, "steps": steps}
                yield f"int4 g{group} {'sym' if symmetric else 'asym'} {method}", changes, True
    for group in ("channel", 128):
        yield f"int5 {group} sym gptq", {"weights.dtype": "int5", "weights.group_size": group}, False


def load(path: Path | None) -> LLM:
    """In float32, one thread."""
    return load_llm(None if path is None else str(path), dtype="float32", device="cpu", threads=1)


def window_kl(path: Path, probe: Probe, windows: Windows) -> list[float]:
    """KL of each window."""
    pieces = probe.compare(load(path)).kl.split([len(ids) for ids in windows])
    return [float(piece.double().mean()) for piece in pieces]


def bootstrap(ours: list[float], theirs: list[float], rounds: int = 4000) -> float:
    """Share of resamples of the windows in which ours is not below theirs."""
    draw, differences = random.Random(0), [a - b for a, b in zip(ours, theirs, strict=True)]
    return sum(sum(draw.choices(differences, k=len(differences))) >= 0 for _ in range(rounds)) / rounds


def compress(path: Path, changes: dict[str, object], samples: int) -> float:
    """Compress the demo model; bits per weight."""
    if not changes.get("steps", True):
        changes = {**changes, "calibration": None}
    else:
        changes = {**changes, "calibration.samples": samples}
    if (path / "quantkit-run.json").is_file():
        return float(json.loads((path / "quantkit-run.json").read_bytes())["bits_per_weight"])
    return quantkit.quantize(None, "gptq-int4", path, overrides=changes, device="cpu").bits_per_weight


def main() -> int:
    """Print the comparison; 0 if the search holds what it promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, default=4.5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer uniform recipes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check(given.work or Path(folder), given)


def check(work: Path, given: argparse.Namespace) -> int:
    """The whole check in a folder."""
    work.mkdir(parents=True, exist_ok=True)
    recipe = work / f"bits-{given.bits:g}.yaml"
    settings = {"calibration.samples": given.samples, "steps": STEPS["awq+gptq"]}
    engine = {"threads": 1}
    how = {"work": work / "search", "overwrite": True, "engine": engine, "device": "cpu"}
    found = quantkit.search(None, "gptq-int4", recipe, bits=given.bits, overrides=settings, progress=say, **how)
    original = load(None)
    windows = fixed_windows(original, calibration_text("search check", 120_000), max_tokens=32_000)
    probe = Probe(original, windows)
    ours_path = work / f"searched-{given.bits:g}"
    command = [sys.executable, "-m", "quantkit", "quantize", "--recipe", str(recipe), "-o", str(ours_path)]
    subprocess.run([*command, "--overwrite", "--quiet", "--device", "cpu"], check=True, stdout=subprocess.DEVNULL)
    ours = window_kl(ours_path, probe, windows)
    mean = sum(ours) / len(ours)
    print(f"searched: {found.bits_per_weight:.3f} bits, expected {found.expected_kl:.5f}, "
          f"measured {found.measured_kl:.5f} on held-out text ({100 * found.prediction_error:+.1f} %), "
          f"{mean:.5f} on new text ({100 * (found.expected_kl / mean - 1):+.1f} %)")  # fmt: skip
    off = abs(found.prediction_error)
    beaten = [against(work, ours, windows, probe, given, *item) for item in uniform_recipes(given.quick)]
    print(f"{sum(beaten)} of {len(beaten)} as they should be; prediction off by {100 * off:.1f} %")
    return 0 if all(beaten) and off <= TOLERANCE else 1


def against(
    work: Path, ours: list[float], windows: Windows, probe: Probe, given: argparse.Namespace,
    name: str, changes: dict[str, object], must: bool,
) -> bool:  # fmt: skip
    """One uniform recipe beside the searched one; whether it is beaten, where it has to be."""
    path = work / name.replace(" ", "-")
    bits = compress(path, changes, given.samples)
    theirs = window_kl(path, probe, windows)
    paired = compare_pairs([(theirs, ours)])
    won = paired.difference < 0 and paired.p_value < 0.05
    print(f"{name:22} {bits:.3f} bits, KL {sum(theirs) / len(theirs):.5f}, ours is {paired.ratio:.2f} of it "
          f"(p {paired.p_value:.1e}, bootstrap {bootstrap(ours, theirs):.4f}) "
          f"{'beaten' if won else 'not beaten'}{'' if must else ', outside'}", flush=True)  # fmt: skip
    return won or not must


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
