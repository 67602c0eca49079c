"""Which engines read a checkpoint: by its on-disk format and its numbers, with the reason.

As of late 2026 and of the engines' documentation and sources, not tried here: engines change monthly. Architecture
support is another question, which this table does not answer.

Sources: compressed-tensors `config/format.py`; vLLM `compressed_tensors.py`, `gptq_marlin.py`, `awq_marlin.py`; SGLang
`compressed_tensors.py`; transformers `quantizers/`; llama.cpp `convert_hf_to_gguf.py`; TensorRT-LLM
`_torch/model_config.py`, which reads compressed-tensors' fp8 and nvfp4 kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.models.tensors import Matrix
from quantkit.planning.shape import ModelShape
from quantkit.planning.weights import WeightForm

LOADERS = ("vLLM", "SGLang", "transformers", "llama.cpp", "TensorRT-LLM")
_MARLIN_GROUPS = (None, 32, 64, 128)
_PACKED_BITS = (4, 8)
# Which GPUs make products of a number type in vLLM and SGLang; of several the first counts.
_PRODUCTS = {
    "fp4": "fp4 products on Blackwell; before, weights only",
    "fp8": "fp8 products from Ada and Hopper on; before, weights only",
    "int8": "int8 products, from Turing on",
    "bf16": "Marlin kernels, from Ampere on",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderAnswer:
    """Whether one engine reads a checkpoint.

    Args:
        name: of the engine.
        reads: yes or no.
        reason: why not, or what it is read by and under which condition.
    """

    name: str
    reads: bool
    reason: str


_ORDINARY = dict.fromkeys(LOADERS, (True, "an ordinary checkpoint, as large as the original"))
_DENSE = {**_ORDINARY, "llama.cpp": (True, "after convert_hf_to_gguf.py")}
_GGUF = {
    **dict.fromkeys(("vLLM", "SGLang"), (True, "experimental, slower than its other formats")),
    "transformers": (True, "decoded to 16 bits while loading"),
    "llama.cpp": (True, "its own format"),
    "TensorRT-LLM": (False, "it reads Hugging Face checkpoints only"),
}


def loaders(shape: ModelShape, forms: Sequence[WeightForm], format_name: str) -> list[LoaderAnswer]:
    """Every engine's answer.

    Args:
        shape: of the model, for sizes that kernels cannot take.
        forms: that occur in the checkpoint.
        format_name: on-disk format.
    """
    family = format_name.replace("_", "-").partition("-v")[0]
    if family == "dense" or not forms:
        answers = _DENSE
    elif family == "gguf":
        answers = _GGUF
    else:
        answers = {
            **dict.fromkeys(("vLLM", "SGLang"), _server(family, shape, forms)),
            "transformers": _transformers(family, forms),
            "llama.cpp": (False, "it reads GGUF only"),
            "TensorRT-LLM": _tensorrt(family, forms),
        }
    return [LoaderAnswer(name=name, reads=reads, reason=reason) for name, (reads, reason) in answers.items()]


def _tensorrt(family: str, forms: Sequence[WeightForm]) -> tuple[bool, str]:
    if family == "compressed-tensors" and all(form.name.startswith("fp8") and form.compute == "fp8" for form in forms):
        return True, "fp8 per channel and token, in releases since 2026"
    return False, "it reads fp8 of compressed-tensors, and nothing else written here"


def _transformers(family: str, forms: Sequence[WeightForm]) -> tuple[bool, str]:
    if family != "compressed-tensors":
        return True, "with gptqmodel installed"
    if any(form.is_float and form.own_scale_bytes for form in forms):
        return True, "with compressed-tensors installed, decoded to bfloat16"
    if any(form.bits not in _PACKED_BITS for form in forms):
        return True, "with compressed-tensors of the same packing, decoded at load"
    return True, "with compressed-tensors installed"


def _server(family: str, shape: ModelShape, forms: Sequence[WeightForm]) -> tuple[bool, str]:
    """vLLM and SGLang, which share kernels and most of their rules."""
    for problem in filter(None, (_problem(form, family, shape) for form in forms)):
        return False, problem
    computes = {form.compute for form in forms}
    return True, next(text for compute, text in _PRODUCTS.items() if compute in computes)


def _problem(form: WeightForm, family: str, shape: ModelShape) -> str | None:
    if form.compute != "bf16" or form.is_float:
        return None
    if form.bits not in _PACKED_BITS:
        return f"no kernel for {form.bits}-bit weights of this format; 4 and 8 bits have one"
    if form.group_size not in _MARLIN_GROUPS:
        return f"no kernel for groups of {form.group_size}; 32, 64, 128 and channel have one"
    if family == "gptq" and not form.symmetric:
        return "its GPTQ kernels take symmetric weights only; use format compressed-tensors or awq"
    odd = next((m for layer in shape.layers for m in layer.matrices if m.quantizable and _is_odd(m)), None)
    if odd is not None:
        size = f"{odd.out_features} x {odd.in_features}"
        return f"{odd.first} is {size}; Marlin kernels want multiples of 64 x 128, others --dtype float16"
    return None


def _is_odd(matrix: Matrix) -> bool:
    return bool(matrix.out_features % 64 or matrix.in_features % 128)
