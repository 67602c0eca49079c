"""Count the operations of a `quantkit` command by number type, and print them as JSON in the last line; time nothing.

    python evals/cost/arithmetic.py quantize MODEL --recipe FILE -o OUT --no-resume

It counts the matrix products, attention, factorizations and solves that torch dispatches in the main thread. A
multiplication and an addition are two operations. A product is counted in full, even if its result is symmetric,
because it is computed in full. NATIVE counts the products of our own C files, in the number type that they multiply.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
FACTORS = {"linalg_cholesky_ex": 1 / 3, "cholesky_inverse": 2 / 3, "_linalg_solve_ex": 2 / 3}
SOLVES = {"linalg_solve_triangular": 1, "cholesky_solve": 2}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _added_products(tokens: int, rows: int, columns: int, lower: int) -> int:
    """Return the operations of `qk_add_products`: strips of 48 columns, without the rows above the diagonal."""
    strips = ((start, min(48, columns - start)) for start in range(0, columns, 48))
    skipped = sum(width * max(0, start - lower) for start, width in strips if lower >= 0)
    return 2 * tokens * (rows * columns - skipped)


def _normal_equations(first: int, count: int, groups: int, size: int, outputs: int) -> int:
    """Return the operations of `qk_normal_equations`: products of each group with itself and all later groups."""
    return 2 * outputs * size**2 * sum(groups - first - group for group in range(count))


NATIVE = {  # number type and operations of a call, keyed by function of numerics/native
    "qk_add_products": ("bfloat16", lambda a: _added_products(a[4], *a[6:9])),
    "qk_normal_equations": ("bfloat16", lambda a: _normal_equations(*a[4:9])),
    "qk_settle": ("float32", lambda a: a[8] ** 2 * a[9]),
}


class Operations(TorchDispatchMode):
    """Counts operations by number type. *Mutable*."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def wrapped(self, function: Any) -> Any:
        """Return `native.function` with counting added."""

        def declare(name: str, *arguments: Any, **named: Any) -> Any:
            call, (dtype, count) = function(name, *arguments, **named), NATIVE.get(name, ("", lambda _: 0))

            def counting(*values: Any) -> Any:
                self.counts[dtype] += count(values)
                return call(*values)

            return counting

        return declare

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Run an operation and count it."""
        named = named or {}
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        count = operations(name, tensors, arguments, named)
        if not count:  # without gradients, linears arrive here undivided
            with self:
                result = function.decompose(*arguments, **named)
            if result is not NotImplemented:
                return result
        if count:
            self.counts[str(tensors[-1].dtype).removeprefix("torch.")] += count
        return function(*arguments, **named)


def operations(name: str, tensors: list[Tensor], arguments: Any, named: dict[str, Any]) -> int:
    """Return the operations of one call; 0 if this operation is not counted.

    Args:
        name: name of the operation, without its namespace and the final _ of in-place operations.
        tensors: the arguments that are tensors.
        arguments, named: positional and named arguments of the call.
    """
    if name in PRODUCTS:
        first, second = tensors[-2:]
        return 2 * math.prod(first.shape) * (second.shape[-1] if second.dim() > 1 else 1)
    if name in FACTORS:
        return int(FACTORS[name] * math.prod(tensors[0].shape) * tensors[0].shape[-1])
    if name in SOLVES:  # of A X = B, given as (A, B) or (B, L)
        sizes = sorted((tensors[0], tensors[1]), key=lambda tensor: tensor.shape[-1] != tensor.shape[-2])
        return SOLVES[name] * math.prod(sizes[1].shape) * sizes[0].shape[-1]
    if name == ATTENTION:
        query, keys = tensors[:2]
        is_causal = named.get("is_causal", len(arguments) > 4 and bool(arguments[4]))
        return 4 * math.prod(query.shape) * keys.shape[-2] // (2 if is_causal else 1)
    return 0


def main() -> None:
    """Run the command line under the counter."""
    from quantkit.cli import main as run
    from quantkit.numerics import native

    counted = Operations()
    native.function = counted.wrapped(native.function)
    with counted:
        run(sys.argv[1:], standalone_mode=False)
    print(json.dumps({"operations": dict(+counted.counts)}), flush=True)


if __name__ == "__main__":
    main()
