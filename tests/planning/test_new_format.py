"""A format added as one file is sized by its own answer, and refused where it gives none."""

from __future__ import annotations

import pytest

import quantkit.formats
from quantkit.errors import SchemeError
from quantkit.formats.gguf import FORMAT, matrix_block
from quantkit.numerics.dtype import FALLBACK, GGML_TYPES
from quantkit.numerics.scheme import WeightScheme
from quantkit.planning.memory import from_linear
from quantkit.planning.shape import ModelShape
from quantkit.registry import Registry
from tests.formats.schemes import SCHEMES

SOURCE = """
from quantkit.formats.base import Format

class Bytewise(Format):
    name = "bytewise"

    def decode(self, tensors, scheme):
        raise NotImplementedError
"""
ANSWER = """
    def linear_bytes(self, scheme, out_features, in_features, scale_bytes):
        return out_features * in_features + 7
"""


@pytest.fixture
def add(tmp_path, monkeypatch):
    def written(answer: str) -> None:
        (tmp_path / "bytewise.py").write_text(f"{SOURCE}{answer}\n\nFORMAT = Bytewise()\n")
        monkeypatch.setattr(quantkit.formats, "__path__", [*quantkit.formats.__path__, str(tmp_path)])
        monkeypatch.delitem(__import__("sys").modules, "quantkit.formats.bytewise", raising=False)
        fresh = Registry(package="quantkit.formats", attribute="FORMAT", noun="format")
        monkeypatch.setattr(quantkit.formats, "REGISTRY", fresh)

    return written


def test_planning_sizes_a_new_format_by_its_own_answer(add):
    add(ANSWER)
    assert from_linear(SCHEMES["int4-g32"], "bytewise").matrix_bytes(32, 64) == 32 * 64 + 7


def test_a_new_format_that_does_not_say_its_bytes_is_refused(add):
    add("")
    with pytest.raises(SchemeError, match="bytewise format cannot count the bytes of a weight"):
        from_linear(SCHEMES["int4-g32"], "bytewise").matrix_bytes(32, 64)


@pytest.mark.parametrize(("scheme", "per_32"), [("int4-g32", 18), ("mxfp4", 17)])
def test_gguf_is_sized_in_its_blocks(scheme, per_32):
    assert from_linear(SCHEMES[scheme], "gguf").matrix_bytes(32, 64) == 32 * 64 // 32 * per_32


def test_blocks_of_gguf_have_ggmls_sizes():
    import gguf

    sizes = {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] for name in GGML_TYPES}
    assert sizes == {name: dtype.block for name, dtype in GGML_TYPES.items()}


def test_embedding_and_head_of_a_gguf_file_are_sized_in_the_type_that_fits():
    from quantkit.planning.recipes import _ends_bytes

    wide, narrow = (
        ModelShape(name="x", counted_from="config.json", hidden_size=size, embedding=10 * size, head=head)
        for size, head in ((256, 2560), (64, 0))
    )
    assert _ends_bytes(wide, "q6_k") == 2 * 10 * 210
    assert _ends_bytes(narrow, "q6_k") == 10 * 2 * 34  # as Q8_0
    assert _ends_bytes(narrow, None) is None


def test_calibrated_and_rounded_matrices_fall_back_to_the_same_blocks():
    for name, other in FALLBACK.items():
        block = FORMAT.symmetric_block(WeightScheme(dtype=other, group_size=32, symmetric=not other.has_minimums))
        assert block == matrix_block(name, 32)
