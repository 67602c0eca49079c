"""GPTQ v1 and v2 and AWQ: golden bytes of GPTQModel, exact round trips, config in both directions, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from quantkit.errors import CheckpointError, SchemeError
from quantkit.formats import REGISTRY
from quantkit.formats._packing import pack_words, unpack_words
from quantkit.numerics.tensor import QuantizedTensor
from tests.formats.schemes import linear, random_tensor

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gptq_awq.json").read_text())
V1, V2, AWQ = (REGISTRY.load(name) for name in ("gptq", "gptq-v2", "awq"))


def restore(described: dict | None) -> torch.Tensor | None:
    if described is None:
        return None
    data = torch.frombuffer(bytearray.fromhex(described["hex"]), dtype=torch.uint8)
    return data.view(getattr(torch, described["dtype"].removeprefix("torch."))).view(described["shape"])


def assert_same(left: QuantizedTensor, right: QuantizedTensor) -> None:
    assert left.scheme == right.scheme
    for name in ("codes", "scale", "zero_point", "group_index"):
        actual, expected = getattr(left, name), getattr(right, name)
        assert (actual is None) == (expected is None), name
        if actual is not None:
            assert actual.dtype == expected.dtype, name
            assert torch.equal(actual, expected), name


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['format']}-{c['bits']}-{bool(c['group_index'])}")
def test_golden_bytes(case):
    scheme = linear(f"int{case['bits']}", case["group_size"], symmetric=case["symmetric"])
    weight = QuantizedTensor(
        codes=restore(case["codes"]),
        scale=restore(case["scale"]),
        zero_point=restore(case["zero_point"]),
        scheme=scheme.weight,
        group_index=restore(case["group_index"]),
    )
    format_ = REGISTRY.load(case["format"])
    format_.check(scheme, weight.shape)
    tensors = format_.encode(weight, scheme)
    assert tensors.keys() == case["tensors"].keys()
    for name, tensor in tensors.items():
        expected = restore(case["tensors"][name])
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    assert_same(format_.decode(tensors, scheme), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_one_stream_of_bits(bits):
    values = torch.randint(0, 2**bits, (3, 96), generator=torch.Generator().manual_seed(bits))
    words = pack_words(values, bits)
    stream = [sum(int(v) << bits * i for i, v in enumerate(row)) for row in values.tolist()]
    expected = [[n >> 32 * w & 0xFFFFFFFF for w in range(words.shape[1])] for n in stream]
    assert (words.to(torch.int64) & 0xFFFFFFFF).tolist() == expected
    assert unpack_words(words, bits).tolist() == values.tolist()


ROUND_TRIPS = [
    *(("gptq", bits, True, group) for bits in (2, 3, 4, 8) for group in (None, 32, 96)),
    *(("gptq-v2", bits, False, group) for bits in (2, 3, 4, 8) for group in (None, 32)),
    *(("awq", 4, False, group) for group in (None, 32, 96)),
]


@pytest.mark.parametrize(("name", "bits", "symmetric", "group"), ROUND_TRIPS)
def test_round_trip_is_exact(name, bits, symmetric, group):
    format_, scheme = REGISTRY.load(name), linear(f"int{bits}", group, symmetric=symmetric)
    for seed, (dtype, rows) in enumerate(itertools.product((torch.float16, torch.bfloat16), (32, 96))):
        weight = random_tensor(seed, (rows, 192), scheme.weight, dtype)
        format_.check(scheme, weight.shape)
        assert_same(format_.decode(format_.encode(weight, scheme), scheme), weight)


@pytest.mark.parametrize("format_", [V1, V2], ids=["v1", "v2"])
def test_groups_in_another_order(format_):
    scheme = linear("int4", 32)
    plain = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    index = torch.arange(64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))] // 32
    weight = QuantizedTensor(
        codes=plain.codes, scale=plain.scale, zero_point=None, scheme=scheme.weight, group_index=index
    )
    assert_same(format_.decode(format_.encode(weight, scheme), scheme), weight)
    config = format_.config({"a": scheme}, ["lm_head"], group_order=True)
    assert config["quantization_config"]["desc_act"] is True


def test_version_1_stores_the_zero_point_minus_one():
    scheme = linear("int4", 32)
    weight = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    assert set(V1.encode(weight, scheme)["qzeros"].view(-1).tolist()) == {0x77777777}
    assert set(V2.encode(weight, scheme)["qzeros"].view(-1).tolist()) == {0x88888888 - (1 << 32)}


def test_version_1_reads_asymmetric_weights_of_other_tools():
    scheme = linear("int4", 32, symmetric=False)
    weight = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    weight.zero_point.clamp_(min=-7)  # the lowest cannot be stored
    assert_same(V1.decode(V1.encode(weight, scheme), scheme), weight)
    weight.zero_point[3, 1] = -8
    with pytest.raises(SchemeError, match="gptq-v2"):
        V1.encode(weight, scheme)


@pytest.mark.parametrize("dtype", ["int2", "int3", "int4", "int8"])
def test_version_1_reads_zero_points_of_0_as_gptqmodel_stores_them(dtype):
    """It subtracts one from each packed word, with a borrow from field to field; at 3 bits from each field."""
    scheme = linear(dtype, 32, symmetric=False)
    weight = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    bits = scheme.weight.dtype.bits
    weight.zero_point[::3] = int(scheme.weight.dtype.minimum)
    tensors = V2.encode(weight, scheme)
    if bits == 3:
        fields = unpack_words(tensors["qzeros"], bits)
        tensors["qzeros"] = pack_words((fields - 1) % 8, bits)
    else:
        tensors["qzeros"] = tensors["qzeros"] - sum(1 << at for at in range(0, 32, bits))
    assert_same(V1.decode(tensors, scheme), weight)


@pytest.mark.parametrize("format_", [V1, V2])
@pytest.mark.parametrize(("shape", "group"), [((172, 64), 32), ((64, 172), None)])
def test_last_words_may_be_filled_up(format_, shape, group):
    """As GPTQModel writes the 172 channels of stories260K; we write multiples of 32 only."""
    scheme = linear("int4", group)
    weight = random_tensor(0, shape, scheme.weight, torch.float16)
    tensors = format_.encode(weight, scheme)
    words = tensors["qzeros"].shape[1], tensors["qweight"].shape[0]
    assert words == (-(-shape[0] // 8), -(-shape[1] // 8))
    assert format_.shape({name: tuple(tensor.shape) for name, tensor in tensors.items()}, scheme) == shape
    assert_same(format_.decode(tensors, scheme), weight)


def test_groups_in_order_need_no_index():
    scheme = linear("int4", 32)
    weight = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    tensors = V1.encode(weight, scheme)
    del tensors["g_idx"]
    assert_same(V1.decode(tensors, scheme), weight)


CONFIGS = [
    ("gptq", linear("int4", 128), {"bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}),
    ("gptq-v2", linear("int3", symmetric=False), {"bits": 3, "group_size": -1, "checkpoint_format": "gptq_v2"}),
    ("awq", linear("int4", 64, symmetric=False), {"bits": 4, "group_size": 64, "version": "gemm"}),
]


@pytest.mark.parametrize(("name", "scheme", "expected"), CONFIGS, ids=lambda value: value if type(value) is str else "")
def test_config_reads_back(name, scheme, expected):
    format_ = REGISTRY.load(name)
    written = format_.config({"m.layers.0.a": scheme, "m.layers.1.a": scheme}, ["m.layers.0.b", "lm_head"])
    assert expected.items() <= written["quantization_config"].items()
    read = format_.recognise(written)
    assert [read.find(f"m.layers.{i}.a") for i in (0, 1)] == [scheme, scheme]
    assert read.find("m.layers.0.b") is None
    assert read.find("lm_head") is None
    recognising = [other for other in REGISTRY.names() if REGISTRY.load(other).recognise(written) is not None]
    assert recognising == [name]


def test_mixed_numbers_are_dynamic_rules():
    linears = {"x.0.a": linear("int4", 32), "x.1.a": linear("int4", 32), "x.10.a": linear("int8")}
    read = V1.recognise(V1.config(linears, []))
    assert {name: read.find(name) for name in linears} == linears
    with pytest.raises(SchemeError, match="one scheme"):
        AWQ.config({"a": linear("int4", 32, symmetric=False), "b": linear("int4", symmetric=False)}, [])


def test_the_first_dynamic_expression_wins():
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    section["dynamic"] = {"+:.*\\.0\\.b": {"bits": 8}, "-:.*b$": {}, ".*": {"group_size": 64}}
    read = V1.recognise({"quantization_config": section})
    assert read.find("m.0.b").weight.dtype.bits == 8
    assert read.find("m.1.b") is None
    assert read.find("m.1.a").weight.group_size == 64


def test_autoround_names_of_the_layouts():
    section = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    assert V1.recognise({"quantization_config": {**section, "packing_format": "auto_round:auto_gptq"}}) is not None
    awq = {"quantization_config": {**section, "sym": False, "packing_format": "auto_round:auto_awq"}}
    assert AWQ.recognise(awq).default == linear("int4", 32, symmetric=False)
    assert V1.recognise(awq) is V2.recognise(awq) is None


REFUSED = [
    ("gptq", linear("int4", 32, symmetric=False), (32, 64), "format=gptq-v2"),
    ("gptq", linear("fp8"), (32, 64), "weights.dtype"),
    ("gptq", linear("int8", inputs="int8"), (32, 64), "compressed-tensors"),
    ("gptq", linear("int4", 48), (32, 64), "weights.group_size"),
    ("gptq-v2", linear("int4"), (40, 64), "multiple of 32 outputs, but this linear has 40"),
    ("gptq-v2", linear("int4"), (32, 172), "multiple of 32 inputs, but this linear has 172"),
    ("awq", linear("int4", 32), (32, 64), "weights.symmetric=false"),
    ("awq", linear("int8", 32, symmetric=False), (32, 64), "weights.dtype=int4"),
    ("awq", linear("int4", 32, symmetric=False), (36, 64), "has 36"),
]


@pytest.mark.parametrize(("name", "scheme", "shape", "message"), REFUSED)
def test_refused_before_any_work(name, scheme, shape, message):
    with pytest.raises(SchemeError, match=message):
        REGISTRY.load(name).check(scheme, shape)


def test_single_precision_scales_are_not_rounded_silently():
    for format_, symmetric in ((V1, True), (AWQ, False)):
        scheme = linear("int4", 32, symmetric=symmetric)
        with pytest.raises(SchemeError, match=r"scales are torch\.float32"):
            format_.encode(random_tensor(0, (32, 64), scheme.weight, torch.float32), scheme)


def damaged(name: str, tensors: dict) -> list[dict]:
    short = {**tensors, "scales": tensors["scales"][:, 1:]}
    return [
        {key: value for key, value in tensors.items() if key != "qzeros"},
        short,
        {**tensors, "qweight": tensors["qweight"].float()},
        {**tensors, "qweight": tensors["qweight"].view(-1)},
        *([{**tensors, "g_idx": tensors["g_idx"] + 9}] if "g_idx" in tensors else []),
    ]


@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq"])
def test_contradictory_tensors_are_refused(name):
    format_, scheme = REGISTRY.load(name), linear("int4", 32, symmetric=name != "awq")
    tensors = format_.encode(random_tensor(0, (32, 64), scheme.weight, torch.float16), scheme)
    for broken in damaged(name, tensors):
        with pytest.raises(CheckpointError):
            format_.decode(broken, scheme)
    asymmetric = {**tensors, "qzeros": tensors["qzeros"] ^ 1}
    with pytest.raises(CheckpointError, match=r"symmetric|zero_point"):
        format_.decode(asymmetric, linear("int4", 32))


BAD_CONFIGS = [
    ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits 5 is not supported"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": 1}, "sym is 1"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "not a valid regular expression"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": []}, None),
    ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "x"}, "list of names"),
]


@pytest.mark.parametrize(("section", "message"), BAD_CONFIGS)
def test_configs_that_cannot_be_decoded(section, message):
    def read() -> list:
        return [format_.recognise({"quantization_config": section}) for format_ in (V1, V2, AWQ)]

    if message is None:
        assert sum(scheme is not None for scheme in read()) == 1
        return
    with pytest.raises(SchemeError, match=message):
        read()
