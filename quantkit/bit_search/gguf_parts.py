"""Parts of a search for a GGUF file other than linears: the type of embedding and head, and the size of the rest."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gguf import GGMLQuantizationType as Block
from torch import Tensor
from torch.nn.functional import embedding

from quantkit.bit_search.candidates import Candidate
from quantkit.checkpoints.dense_source import open_dense
from quantkit.compress.convert import convert
from quantkit.compress.recipe import Recipe
from quantkit.errors import ModelError
from quantkit.evaluate.group_swaps import FusedGroup, build_with_bias
from quantkit.formats.ggml.blocks import dequantize_blocks, round_to_blocks
from quantkit.formats.gguf import FORMAT, MATRIX_BLOCKS, matrix_block, matrix_bytes
from quantkit.kernels.types import Linear
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.model import NativeModel

EMBEDDING = "embedding"
# Type of embedding and head for candidates to which embedding and head cannot be rounded.
_BESIDE = {"int5": "q5_k", "q5_1": "q5_k", "int6": "q6_k", "int8": "q8_0"}
_ENTRIES = 4096  # bytes of the `quantkit.*` entries, without the module names in the recipe
_LIST = "  - \n"  # text around each module name in the YAML of a recipe
_PADDING = 32  # maximum number of padding bytes after a tensor

_Ends = tuple[Callable[[Tensor], Tensor], Linear]  # fields `embedding` and `head` of a model


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateForm:
    """How a matrix is stored under a candidate.

    Args:
        num_weights: number of weights in the matrix.
        num_bytes: bytes of the codes and scales.
        scheme: name of the number type and groups.
    """

    num_weights: int
    num_bytes: int
    scheme: str


def makes_gguf(recipe: Recipe) -> bool:
    """Whether the output of a recipe is a GGUF file."""
    return recipe.format == FORMAT.name


def embedding_type(candidate: Candidate) -> str:
    """Return the type of embedding and head, a key of `MATRIX_BLOCKS`, that corresponds to a candidate for linears."""
    return candidate.dtype if candidate.dtype in MATRIX_BLOCKS else _BESIDE.get(candidate.dtype, "q4_0")


class Ends:
    """Embedding and head of the original model; while `type_name` is set, they have values rounded to this GGUF type.

    Args:
        original: the loaded original model.
    Attributes:
        modules: full names of embedding and head; of the embedding alone if the head is tied to it.
    Raises:
        ModelError: quantkit runs the model through transformers.
    """

    def __init__(self, original: LLM) -> None:
        if not isinstance(original.model, NativeModel):
            raise ModelError(
                f"{original.path}: transformers runs this model, but a search for a GGUF file needs quantkit's engine; "
                "choose another format"
            )
        self._model, self._reader = original.model, open_dense(original.path)
        family = self._model.config.family
        self.modules = (family.embedding,) if self._model.config.tied else (family.embedding, family.head)
        self._original: _Ends = self._model.embedding, self._model.head
        self._blocks: dict[tuple[str, str], tuple[Block, Tensor]] = {}
        self._type: str | None = None
        self._last: tuple[str, _Ends] | None = None

    @property
    def type_name(self) -> str | None:
        """Type to which embedding and head are rounded, a key of `MATRIX_BLOCKS`; None = they have their original
        values.
        """
        return self._type

    @type_name.setter
    def type_name(self, name: str | None) -> None:
        if name is not None and (self._last is None or self._last[0] != name):
            self._last = name, self._rounded(name)
        assert name is None or self._last is not None
        self._model.embedding, self._model.head = self._original if name is None else self._last[1]  # type: ignore[index]
        self._type = name

    def group(self, candidate: Candidate) -> FusedGroup:
        """Return embedding and head as one group to quantize, in the type that corresponds to a candidate."""
        infos, name = [self._reader.info(f"{module}.weight") for module in self.modules], embedding_type(candidate)
        return FusedGroup(
            layer=0,  # a change of the embedding affects all layers, so all run again
            name=EMBEDDING,
            modules=self.modules,
            part=(self, "type_name"),
            replacement=name,
            quantized_bytes=sum(matrix_bytes(name, *info.shape) for info in infos),
            stored_bytes=sum(info.num_bytes for info in infos),
            dense_bytes=sum(2 * info.num_bytes // info.dtype.itemsize for info in infos),
        )

    def stored(self, candidate: Candidate) -> dict[str, CandidateForm]:
        """Return how each module is stored in the type that corresponds to a candidate, keyed by full name."""
        name, shapes = embedding_type(candidate), {m: self._reader.info(f"{m}.weight").shape for m in self.modules}
        return {
            module: CandidateForm(
                num_weights=math.prod(shape), num_bytes=matrix_bytes(name, *shape), scheme=matrix_block(name, shape[-1])
            )
            for module, shape in shapes.items()
        }

    def _rounded(self, name: str) -> _Ends:
        tables = [self._decoded(name, module) for module in self.modules]
        head = build_with_bias(tables[-1], self._reader, self.modules[-1], self._model)
        return partial(embedding, weight=tables[0]), head

    def _decoded(self, name: str, module: str) -> Tensor:
        """Return a weight (V, H), rounded to a GGUF type, in the model's dtype. Blocks are cached: rounding is slow."""
        shape = self._reader.info(f"{module}.weight").shape
        if (name, module) not in self._blocks:
            block = Block[matrix_block(name, shape[-1])]
            self._blocks[name, module] = block, round_to_blocks(self._reader.tensor(f"{module}.weight"), block)
        values = dequantize_blocks(*self._blocks[name, module], shape)
        return values.to(self._model.device, self._model.dtype)


def rest_bytes(trial: Path, base: Recipe, stored: Mapping[str, CandidateForm], type_name: str) -> int:
    """Return an upper bound on the bytes of a GGUF file outside the tensors whose types a search chooses.

    Args:
        trial: folder of the model compressed with one candidate. A GGUF file is made from it, measured and deleted.
        base: recipe that the search starts from.
        stored: how the tensors whose types the search chooses are stored in the trial, keyed by full name.
        type_name: type of embedding and head in the trial.
    """
    file = trial.with_name(f"{trial.name}.gguf")
    size = convert(trial, FORMAT.name, file, embedding=type_name, overwrite=True).output_bytes
    file.unlink()
    recipe = len(json.dumps(base.source)) + sum(len(module) + len(_LIST) for module in stored)
    return size - sum(part.num_bytes for part in stored.values()) + recipe + _ENTRIES + _PADDING * len(stored)
