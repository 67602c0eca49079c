"""What each engine's rules say of a checkpoint, and that every rule names its source and can apply."""

from __future__ import annotations

import itertools
import re

import pytest

from quantkit.engine_rules import CPU, StoredLinear, StoredModel, engine_names, find_engine, judge, judge_all
from quantkit.engine_rules.data_sheets import AMX, OTHER
from quantkit.engine_rules.rules import read_engine
from quantkit.errors import InputError, ReportError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme

AMPERE, ADA, HOPPER, BLACKWELL, RTX_50 = 80, 89, 90, 100, 120


def linear(weights, inputs=None, shape=(4096, 4096), expert=False):
    """`int4 g128 asym`, `fp8 channel`, `fp8 128x128`, `int8 tensor` as a linear; inputs by token, or `static int8`."""
    dtype, size, *rest = weights.split()
    rows, _, columns = size.rpartition("x")
    group = {"channel": None, "tensor": None}.get(size) or (
        int(columns.removeprefix("g")) if size[-1].isdigit() else None
    )
    weight = WeightScheme(
        dtype=DTYPES[dtype],
        group_size=group,
        symmetric=not rest,
        block_rows=None if size == "tensor" else int(rows or 1),
    )
    activation = None
    if inputs:
        number, static = DTYPES[inputs.split()[-1]], inputs.startswith("static")
        group = number.group or (128 if rows else None)
        granularity = "tensor" if static else "token"
        activation = ActivationScheme(dtype=number, granularity=granularity, dynamic=not static, group_size=group)
    return StoredLinear(scheme=LinearScheme(weight=weight, activation=activation), shape=shape, expert=expert)


def reads(engine, capability, *parts, format_="compressed-tensors", hidden=4096, **facts):
    model = StoredModel(format=format_, linears=(linear(*parts, **facts),), hidden_size=hidden)
    return judge(engine, model, capability)


VLLM = [  # defects of earlier rules first, each beside what they said rightly
    ("fast", HOPPER, "mxfp4 g32"),
    ("wrong", BLACKWELL, "mxfp4 g32"),
    ("wrong", RTX_50, "mxfp4 g32"),
    ("fast", BLACKWELL, "mxfp4 g32", "mxfp4"),
    ("fast", ADA, "mxfp8 g32"),
    ("wrong", BLACKWELL, "mxfp8 g32"),
    ("fast", HOPPER, "int4 g128", "fp8"),
    ("no", ADA, "int4 g128", "fp8"),
    ("no", BLACKWELL, "int4 g128", "fp8"),
    ("no", HOPPER, "int4 g64", "fp8"),
    ("no", HOPPER, "int4 g128", "fp8", (4096, 352)),
    ("no", HOPPER, "int4 g128", "fp8", (352, 4096)),
    ("fast", HOPPER, "int4 g128", "fp8", (256, 512), True),
    ("no", HOPPER, "int4 g128", "fp8", (128, 512), True),
    ("slow", AMPERE, "int8 g128 asym"),
    ("fast", HOPPER, "int8 g128 asym"),
    ("fast", AMPERE, "int4 g128 asym"),
    ("fast", AMPERE, "int4 g32", None, (96, 352)),
    ("slow", AMPERE, "int4 g256"),
    ("slow", AMPERE, "int3 g128"),
    ("fast", AMPERE, "int4 g128 asym", None, (4096, 4096), True),
    ("no", AMPERE, "int8 g128 asym", None, (4096, 4096), True),
    ("no", AMPERE, "fp8 channel", None, (4096, 4096), True),
    ("fast", HOPPER, "int8 channel", "int8"),
    ("no", BLACKWELL, "int8 channel", "int8"),
    ("no", HOPPER, "int4 g128", "int8"),
    ("fast", CPU, "int4 g128", "int8"),
    ("fast", CPU, "int4 g128 asym"),
    ("fast", CPU, "int8 channel", "int8"),
    ("slow", CPU, "fp8 channel", "fp8"),
    ("no", CPU, "int8 g128"),
    ("no", CPU, "fp8 tensor", "static fp8"),
    ("no", CPU, "fp8 128x128", "fp8"),
    ("no", CPU, "nvfp4 g16"),
    ("no", CPU, "mxfp4 g32"),
    ("no", CPU, "int4 g128", "fp8"),
    ("no", CPU, "int4 g128", None, (256, 256), True),
    ("slow", AMX, "int4 g128", None, (256, 256), True),
    ("no", CPU, "int4 g128", None, (250, 256)),
    ("slow", AMX, "fp8 128x128", "fp8"),
    ("slow", AMX, "fp8 tensor", "static fp8"),
    ("fast", AMX, "int4 g128"),
    ("unknown", OTHER, "int4 g128"),
    ("fast", HOPPER, "nvfp4 g16"),
    ("fast", AMPERE, "fp8 128x128", "fp8"),
]


@pytest.mark.parametrize("case", VLLM, ids=lambda case: " ".join(map(str, case)))
def test_vllm(case):
    expected, capability, *parts = case
    assert reads("vllm", capability, *parts).reads == expected


def test_experts_of_vllm_mind_the_width_of_the_model():
    expert = {"shape": (1408, 2048), "expert": True}
    assert reads("vllm", AMPERE, "int4 g128", **expert).reads == "fast"
    assert reads("vllm", AMPERE, "int4 g128", hidden=2112, **expert).reads == "slow"
    assert reads("vllm", AMPERE, "int4 channel", hidden=2112, **expert).reads == "no"
    assert reads("vllm", AMPERE, "int4 g128", hidden=2112).reads == "fast"


OTHER_FORMATS = [
    ("fast", "gptq", "int4 g128"),
    ("no", "gptq-v2", "int4 g128 asym"),
    ("no", "gptq", "int3 g128"),
    ("no", "gptq", "int2 g64"),
    ("no", "gptq", "int4 g256"),
    ("fast", "awq", "int4 g128 asym"),
    ("slow", "awq", "int4 g256 asym"),
    ("no", "gguf", "int4 g32"),
]


@pytest.mark.parametrize("case", OTHER_FORMATS, ids=lambda case: " ".join(case))
def test_vllm_reads_other_formats_by_rules_of_their_own(case):
    expected, name, weights = case
    assert reads("vllm", HOPPER, weights, format_=name).reads == expected
    if expected == "no":
        assert reads("vllm", CPU, weights, format_=name).reads == "no"


def test_groups_in_the_order_of_activations_are_refused_by_vllm_but_not_by_sglang():
    model = StoredModel(format="gptq", linears=(linear("int4 g128"),), group_order=True)
    assert "desc_act=true" in judge("vllm", model, HOPPER).reason
    assert judge("sglang", model, HOPPER).reads == "fast"
    channel = StoredModel(format="gptq", linears=(linear("int4 channel"),), group_order=True)
    assert judge("vllm", channel, HOPPER).reads == "fast"


OTHERS = [
    ("sglang", HOPPER, "fast", "int4 g128"),
    ("sglang", 75, "no", "int4 g128"),
    ("sglang", HOPPER, "no", "int4 g32", None, (96, 352)),
    ("sglang", HOPPER, "no", "mxfp4 g32"),
    ("sglang", HOPPER, "no", "int4 g128", "fp8"),
    ("sglang", HOPPER, "no", "int8 g128 asym"),
    ("sglang", BLACKWELL, "no", "int8 channel", "int8"),
    ("tensorrt-llm", HOPPER, "fast", "fp8 channel", "fp8"),
    ("tensorrt-llm", HOPPER, "no", "nvfp4 g16"),
    ("tensorrt-llm", BLACKWELL, "fast", "nvfp4 g16", "nvfp4"),
    ("tensorrt-llm", HOPPER, "wrong", "int8 channel", "int8"),
    ("tensorrt-llm", HOPPER, "no", "int4 g128"),
    ("transformers", CPU, "slow", "int3 g128"),
    ("transformers", CPU, "wrong", "nvfp4 g16", None, (64, 64), True),
    ("transformers", CPU, "no", "int4 g32 asym", None, (64, 64), True),
    ("transformers", CPU, "no", "int8 channel", "int8", (64, 64), True),
    ("transformers", CPU, "no", "fp8 128x128", "fp8", (256, 256), True),
    ("llama.cpp", CPU, "no", "int4 g32"),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: " ".join(map(str, case)))
def test_other_engines(case):
    engine, capability, expected, *parts = case
    assert reads(engine, capability, *parts).reads == expected


def test_the_worst_linear_decides_and_an_ordinary_model_is_read_by_all():
    model = StoredModel(format="compressed-tensors", linears=(linear("int4 g128"), linear("mxfp4 g32")))
    assert judge("vllm", model, BLACKWELL).reads == "wrong"
    assert all(reading.is_right for reading in judge_all(StoredModel(format="dense"), HOPPER))
    assert {reading.engine for reading in judge_all(StoredModel(format="gguf"), HOPPER) if reading.is_right} == {
        "ONNX Runtime",
        "OpenVINO",
        "SGLang",
        "llama.cpp",
        "transformers",
    }
    others = judge_all(StoredModel(format="gguf", other_codes=True))
    unknown = {r.engine: (r.reads, r.reason) for r in others if r.engine in ("ONNX Runtime", "OpenVINO")}
    said = "unknown", "no rule known for its codes in format gguf"
    assert unknown == {"ONNX Runtime": said, "OpenVINO": said}


def test_without_a_device_each_range_has_its_reason():
    reading = reads("vllm", None, "mxfp4 g32")
    assert reading.reads == "fast"
    assert re.fullmatch(r"8\.0 to 9\.0: Marlin kernels, .*; from 10\.0 on: wrong, it treats .*", reading.reason)
    assert reads("vllm", None, "int4 g128").reason == reads("vllm", AMPERE, "int4 g128").reason
    assert reads("vllm", None, "int4 g64", "fp8").reads == "no"


def test_an_engine_is_asked_about_its_device():
    model = StoredModel(format="compressed-tensors", linears=(linear("mxfp4 g32"),), hidden_size=4096)
    assert [judge(f"vllm:{device}", model).reads for device in ("h100", "RTX 5090", "cpu")] == ["fast", "wrong", "no"]
    assert judge("vllm:h100", model, BLACKWELL).reads == "fast"  # the name's own device wins
    assert judge("transformers:mi300x", model).reads == judge("transformers", model, OTHER).reads == "slow"
    for name in ("vllm:mi300x", "sglang:cpu"):
        with pytest.raises(InputError, match=f"has no rules for .* on {name.partition(':')[2]}"):
            judge(name, model)
    with pytest.raises(InputError, match=r"unknown device 'h10'"):
        judge("vllm:h10", model)
    assert judge("vllm", StoredModel(format="dense"), OTHER).reads == "unknown"
    assert judge("vllm:cpu", StoredModel(format="dense")).reads == "fast"


def test_a_cache_of_our_own_is_told_of():
    own = StoredModel(format="compressed-tensors", linears=(linear("int4 g128"),), cache="own")
    fixed = StoredModel(format="compressed-tensors", linears=(linear("int4 g128"),), cache="fp8")
    for name in ("vllm", "sglang", "transformers", "tensorrt-llm"):
        assert "16-bit keys and values" in judge(name, own, HOPPER).cache
        assert not judge(name, fixed, HOPPER).cache


def test_an_unknown_engine_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"unknown engine 'vlm' \(did you mean 'vllm'\?\); known engines: llama-cpp, "):
        find_engine("vlm")
    assert find_engine("llama.cpp")[0] is find_engine("llama-cpp")[0]


@pytest.mark.parametrize("name", engine_names())
def test_rules_speak_of_what_there_is_and_name_their_source(name):
    engine, _ = find_engine(name)
    for rule in engine.rules:
        assert rule.source and set(rule.when.format) <= set(FORMATS.names()), rule
        assert {*rule.when.weights, *rule.when.inputs} <= {*DTYPES, "16-bit"}, rule
        named = [group for group in (*rule.when.groups, *rule.when.besides) if not isinstance(group, int)]
        assert set(named) <= {"channel", "tensor", "block"}, rule
    assert set(engine.caches) <= {"fp8", "own"}


def test_a_new_engine_is_one_file_and_a_mistake_in_it_is_said_with_its_place(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("title: Mine\nrelease: 1.0\nrules:\n- {reads: fast, when: {weights: [int4]}, reason: mine}\n")
    with pytest.raises(ReportError, match=r"mine\.yaml\.release: expected str, found 1\.0"):
        read_engine(file)
    file.write_text(file.read_text().replace("1.0", "'1.0'"))
    assert engine_names(tmp_path) == ["mine"]
    rule = read_engine(file).rules[0]
    assert rule.when.hold(linear("int4 g128"), StoredModel(format="gptq"), HOPPER)
    assert not rule.when.hold(linear("int8 g128"), StoredModel(format="gptq"), HOPPER)
    assert not rule.when.hold(linear("int4 g128"), StoredModel(format="gptq"), CPU)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("weights", "weight"))
    with pytest.raises(ReportError, match=r"wrong\.yaml\.rules\[0\]\.when: unknown field 'weight' \(did you mean"):
        read_engine(wrong)


WEIGHTS = (
    *(f"int{bits} g{size}{zero}" for bits in (3, 4, 8) for size in (32, 256) for zero in ("", " asym")),
    *("int2 g32", "int4 channel", "int8 channel", "int8 channel asym", "fp8 channel", "fp8 tensor", "fp8 128x128"),
    *("nvfp4 g16", "mxfp4 g32", "mxfp8 g32"),
)
WITH_INPUTS = (
    *(("int4 g128", "fp8"), ("int4 g128", "int8"), ("int8 channel", "int8"), ("int8 channel", "static int8")),
    *(("fp8 channel", "fp8"), ("fp8 tensor", "static fp8"), ("fp8 128x128", "fp8")),
    *((f"{name} g{DTYPES[name].group}", name) for name in ("nvfp4", "mxfp4", "mxfp8")),
)


def everything():
    """Models of one linear: what our formats hold, and sizes and widths that kernels mind."""
    for name, expert, shape in itertools.product(FORMATS.names(), (False, True), ((4096, 4096), (1000, 1000))):
        pairs = [*((weights, None) for weights in WEIGHTS), *(WITH_INPUTS if name == "compressed-tensors" else ())]
        facts = (True, False) if expert or name == "gptq" else (True,)
        for pair, hidden, fact in itertools.product(pairs, (4096, 1000) if expert else (4096,), facts):
            yield StoredModel(
                format=name,
                linears=(linear(*pair, shape, expert),),
                hidden_size=hidden,
                group_order=fact and name.startswith("gptq"),
                compressed_experts=fact,
            )


MODELS = list(everything())


@pytest.mark.parametrize("name", engine_names())
def test_every_rule_applies_to_something_and_every_linear_has_a_rule(name):
    """A rule behind one that says more is dead, and what no rule is about would be a hole in the table."""
    rules, used, holes = find_engine(name)[0].rules, set(), set()
    for model, device in itertools.product(MODELS, (CPU, AMX, 70, 75, AMPERE, HOPPER, BLACKWELL)):
        kind = model.linears[0]
        number = next((i for i, rule in enumerate(rules) if rule.when.hold(kind, model, device)), None)
        used.add(number)
        if number is None and device not in (CPU, AMX):
            holes.add((model.format, kind.describe(), device))
    assert not holes, sorted(holes)[:5]
    assert not [rule for index, rule in enumerate(rules) if index not in used]
