"""Compress a model, verify it, and exit with code 3 if a gate fails.

    python examples/quantize_and_verify.py                                  # the bundled demo model
    python examples/quantize_and_verify.py ./my-model gptq-int4 my-model-int4

It needs `quantkit-lm[eval]`.
"""

import sys

import quantkit


def main(model: str | None = None, recipe: str = "awq-int4", output: str = "demo-verified") -> int:
    """Return 0 if all gates of the recipe hold, else 3."""
    result = quantkit.quantize(model, recipe, output, overrides={"calibration.samples": 32}, overwrite=True)
    print(f"{result.output}: {result.bits_per_weight:.2f} bits per weight")
    for name, linear in result.worst_linears(3):
        print(f"  {name}: relative error {linear.error:.3f}")

    report = quantkit.verify(result.output, output=result.output)
    for gate in report.gates:
        print(f"  {'held' if gate.held else 'FAILED'}: {gate.explanation}")
    return 0 if report.held else 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
