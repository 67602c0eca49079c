"""Compares two outputs of loader_logits.py: largest and root-mean-square difference of logits, perplexities, texts."""

from __future__ import annotations

import argparse

import numpy as np


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("left")
    parser.add_argument("right")
    options = parser.parse_args()
    left, right = np.load(options.left), np.load(options.right)
    names = [name for name in left.files if name.startswith("logits")]
    differences = np.concatenate([(left[name] - right[name]).ravel() for name in names])
    spread = np.concatenate([left[name].ravel() for name in names]).std()
    same = sum(bool((a == b).all()) for a, b in zip(left["texts"], right["texts"], strict=False))
    ratio = float(right["perplexity"]) / float(left["perplexity"]) - 1
    print(
        f"logits: max {np.abs(differences).max():.2e} rms {np.sqrt((differences**2).mean()):.2e} "
        f"(spread {spread:.2f}); "
        f"perplexity {float(left['perplexity']):.5f} {float(right['perplexity']):.5f} ({ratio:+.4%}); "
        f"greedy texts equal {same}/{len(left['texts'])}"
    )


if __name__ == "__main__":
    main()
