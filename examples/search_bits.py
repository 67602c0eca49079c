"""Let quantkit choose the bits of each layer for a size, compress the model with the choice, and print what was chosen.

python examples/search_bits.py                            # the bundled demo model, 4.5 bits per weight
python examples/search_bits.py ./my-model 4.0 mine.yaml
"""

import sys
from collections import Counter

import quantkit


def main(model: str | None = None, bits: str = "4.5", recipe: str = "searched.yaml") -> None:
    """Write a recipe, and the checkpoint that it gives."""
    # Few samples and tokens make the search fast and the choice uncertain: leave these settings out for a real model.
    fast = {"calibration.samples": 8, "calibration.sequence_length": 128}
    found = quantkit.search(
        model, output=recipe, bits=float(bits), overrides=fast, max_tokens=512, rounds=1, overwrite=True
    )
    print(f"{found.recipe}: {found.bits_per_weight:.2f} bits per weight")
    print(f"expected KL {found.expected_kl:.4f}, measured KL {found.measured_kl:.4f}")
    print("groups by choice:", dict(Counter(group.choice for group in found.groups)))

    result = quantkit.quantize(model, found.recipe, "searched-model", overwrite=True)
    print(f"{result.output}: {result.output_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
