"""Reading recipes: what they mean, and the one line that each mistake gets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from quantkit.compress.algorithms import REGISTRY
from quantkit.compress.recipe import check, load
from quantkit.compress.recipe.load import build, with_samples
from quantkit.compress.recipe.schema import (
    ActivationsSection,
    CalibrationSection,
    Document,
    KVCacheSection,
    Measured,
    WeightsSection,
)
from quantkit.errors import RecipeError
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import WeightScheme

DOCS = Path(__file__).parents[3] / "docs" / "recipes.md"
INT4_G32 = "weights: {dtype: int4, group_size: 32}\n"


@pytest.fixture
def write(tmp_path):
    def _write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def message(path: Path | str, overrides=()) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_smallest_recipe_has_all_defaults(write):
    recipe = load(write("weights: {dtype: int8}"))
    assert recipe.name == "mine"
    assert recipe.scheme.default.weight == WeightScheme(dtype=INT8, group_size=None, symmetric=True)
    assert recipe.scheme.default.activation is None
    assert (recipe.steps, recipe.calibration) == ({}, None)
    assert (recipe.format, recipe.seed) == ("compressed-tensors", 0)


def test_steps_are_built_in_order_with_options_and_default_calibration(write):
    recipe = load(write(INT4_G32 + "steps:\n  - awq: {grid: 7}\n  - gptq\n"))
    assert list(recipe.steps) == ["awq", "gptq"]
    assert recipe.steps["awq"].grid == 7
    assert recipe.steps["gptq"] == type(recipe.steps["gptq"])()
    assert recipe.calibration == CalibrationSection()


def test_null_options_are_the_defaults(write):
    assert load(write(INT4_G32 + "steps: [gptq: ]")).steps == load(write(INT4_G32 + "steps: [gptq]")).steps


def test_whole_numbers_and_exponents_are_numbers_where_a_fraction_is_expected(write):
    recipe = load(write(INT4_G32 + "steps: [{smoothquant: {alpha: 1}}, {gptq: {damping: 1e-3}}]"))
    assert (recipe.steps["smoothquant"].alpha, recipe.steps["gptq"].damping) == (1.0, 0.001)


def test_overrides_inherit_and_the_later_one_wins(write):
    text = """
        weights: {dtype: int4, group_size: 32, symmetric: false}
        activations: {dtype: int8}
        overrides:
          - modules: "model.layers.0.*"
            weights: {dtype: int8}
          - modules: ["*.down_proj", 're:.*\\.o_proj']
            weights: {group_size: channel}
          - modules: "model.layers.0.mlp.down_proj"
            skip: true
    """
    scheme = load(write(text)).scheme
    first = scheme.find("model.layers.0.mlp.up_proj")
    assert first.weight == WeightScheme(dtype=INT8, group_size=32, symmetric=False)
    assert first.activation == scheme.default.activation
    assert scheme.find("model.layers.1.mlp.down_proj").weight == WeightScheme(dtype=INT4, symmetric=False)
    assert scheme.find("model.layers.0.self_attn.o_proj").weight == WeightScheme(dtype=INT4, symmetric=False)
    assert scheme.find("model.layers.0.mlp.down_proj") is None
    assert scheme.find("model.layers.1.mlp.up_proj") == scheme.default


def test_what_is_ignored_stays_ignored(write):
    text = INT4_G32 + "ignore: '*.mlp.gate'\noverrides: [{modules: '*', weights: {dtype: int8}}]"
    scheme = load(write(text)).scheme
    assert scheme.find("model.layers.0.mlp.gate") is None
    assert scheme.find("model.layers.0.mlp.up_proj").weight.dtype == INT8


def test_source_is_a_recipe_that_gives_the_same_recipe(write):
    text = """
        weights: {dtype: int4, group_size: 32}
        ignore: ["*.gate"]
        overrides: [{modules: a, weights: {dtype: int8}}, {modules: [b], skip: true}]
        steps: [gptq: {damping: 0.05}]
        calibration: {samples: 3}
    """
    first = load(write(text))
    again = load(write(yaml.safe_dump(first.source), "again.yaml"))
    assert again == first
    assert build(first.source, "source").source == first.source
    assert first.source["calibration"]["sequence_length"] == CalibrationSection().sequence_length
    # What is newer than sources that are kept is in them only where it says something.
    assert "inputs" not in first.source["calibration"]
    original = load(write(text), {"calibration.inputs": "original"})
    assert build(original.source, "source").source["calibration"]["inputs"] == "original"


def test_source_does_not_depend_on_how_the_file_is_written(write):
    short = load(write(INT4_G32 + "steps: [gptq]"))
    long = load(write("# words\ndescription: more words\nsteps:\n- gptq: {}\n" + INT4_G32 + "seed: 0\ncalibration: {}"))
    assert short.source == long.source


MISTAKES = {
    "": "the file is empty",
    "- a": "expected keys such as 'weights: ...', found ['a']",
    "hello": "found 'hello'",
    "a: [": "line 1: while parsing a flow",
    "a: \x01": "not valid YAML",
    "a: 2024-13-01": "not valid YAML: month must be in 1..12",
    "a: 1\n---\nb: 2": "found another document",
    "? [a]\n: 1": "unhashable key",
    "a: !!python/object:os.system x": "could not determine a constructor",
    "weights: {dtype: int4}\nweights: {dtype: int8}": "line 2: key 'weights' is given twice",
    "weights: {dtype: int4, dtype: int8}": "line 1: key 'dtype' is given twice",
    "weight: {dtype: int4}": "unknown key 'weight' (did you mean 'weights'?); valid keys: name, description, weights",
    "1: 2\nweights: {dtype: int4}": "unknown key 1; valid keys: name",
    "name: mine": "weights: is required but missing",
    "weights: int4": "weights: expected a mapping with the keys dtype, group_size, symmetric, signed_scales",
    "weights: {}": "weights.dtype: is required but missing",
    "weights: {dtype: int7}": "weights.dtype: unknown number type 'int7'",
    "weights: {dtype: 4}": "weights.dtype: expected text, found 4",
    "weights: {dtype: int4, goup_size: 8}": "weights: unknown key 'goup_size' (did you mean 'group_size'?)",
    "weights: {dtype: int4, group_size: -1}": "'tensor' or a block such as 128x128, found -1",
    "weights: {dtype: int4, group_size: true}": "a positive whole number, {size: 128, strict: true}, 'channel'",
    "weights: {dtype: int4, group_size: chanel}": "found 'chanel'",
    "weights: {dtype: fp8, group_size: 128x0}": "or a block such as 128x128, found '128x0'",
    "weights: {dtype: nvfp4, group_size: 32}": "weights: nvfp4 has a scale per 16 inputs; set weights.group_size to 16",
    "weights: {dtype: mxfp4, group_size: channel}": "weights: mxfp4 has a scale per 32 inputs",
    "weights: {dtype: int4, group_size: 4x4, symmetric: false}": "set weights.symmetric=true",
    "weights: {dtype: fp8}\nactivations: {dtype: fp8, clip: mse}": "activations.clip: only static scales are clipped",
    "weights: {dtype: fp8}\nactivations: {dtype: fp8, dynamic: false, group_size: 8}": "activations in groups of 8",
    "weights: {dtype: nvfp4}\nactivations: {dtype: nvfp4, dynamic: false}": "activations in groups of 16",
    "weights: {dtype: int4, symmetric: 1}": "weights.symmetric: expected true, false or 'auto', found 1",
    "weights: {dtype: fp8, symmetric: false}": "weights: fp8 has no zero point: set weights.symmetric=true",
    INT4_G32 + "activations: {dtype: int9}": "activations.dtype: unknown number type 'int9'",
    INT4_G32 + "name: a/b": "name: expected letters",
    INT4_G32 + "description: [1]": "description: expected text, found [1]",
    INT4_G32 + "seed: -1": "seed: input should be greater than or equal to 0, found -1",
    INT4_G32 + "seed: x": "seed: expected a whole number, found 'x'",
    INT4_G32 + "format: compresed-tensors": "unknown format 'compresed-tensors' (did you mean 'compressed-tensors'?)",
    INT4_G32 + "ignore: 3": "ignore: expected a module pattern or a list of them, found 3",
    INT4_G32 + "ignore: 're:('": "ignore: 're:(' is not a valid regular expression",
    INT4_G32 + "overrides: [{modules: a}]": "overrides[0]: give 'weights', 'keep: source' or both, or give only 'skip",
    INT4_G32 + "overrides: [{modules: a, skip: false}]": "overrides[0].skip: expected true, found False",
    INT4_G32 + "overrides: [{modules: [], skip: true}]": "overrides[0].modules: the list is empty",
    INT4_G32 + "overrides: [{modules: a, weights: {dtyp: int8}}]": "overrides[0].weights: unknown key 'dtyp'",
    INT4_G32 + "overrides: [{skip: true}]": "overrides[0].modules: is required but missing",
    "weights: {dtype: int4, symmetric: false}\noverrides: [{modules: a, weights: {dtype: fp8}}]": (
        "overrides[0].weights: fp8 has no zero point"
    ),
    INT4_G32 + "steps: gptq": "steps: expected a list, found 'gptq'",
    INT4_G32 + "steps: [gpqt]": "steps[0]: unknown step 'gpqt' (did you mean 'gptq'?); available: autoround, awq",
    INT4_G32 + "steps: [3]": "steps[0]: expected a step such as 'gptq'",
    INT4_G32 + "steps: [{gptq: {}, awq: {}}]": "steps[0]: expected a step such as 'gptq'",
    INT4_G32 + "steps: [gptq, gptq]": "steps[1]: step 'gptq' is given twice",
    INT4_G32 + "steps: [awq, {gptq: {dampin: 1}}]": "steps[1].gptq: unknown key 'dampin' (did you mean 'damping'?)",
    INT4_G32 + "steps: [{gptq: 3}]": "steps[0].gptq: expected a mapping with the keys block_size",
    INT4_G32 + "steps: [{gptq: {damping: x}}]": "steps[0].gptq.damping: expected a number, found 'x'",
    INT4_G32 + "steps: [{gptq: {block_size: 1.5}}]": "steps[0].gptq.block_size: expected a whole number, found 1.5",
    INT4_G32 + "steps: [{gptq: {block_size: true}}]": "steps[0].gptq.block_size: expected a whole number, found True",
    INT4_G32 + "steps: [{gptq: {act_order: wieght}}]": (
        "steps[0].gptq.act_order: expected 'none', 'weight' or 'group', found 'wieght' (did you mean 'weight'?)"
    ),
    INT4_G32 + "steps: [{gptq: {damping: 0}}]": "gptq.damping: input should be greater than 0, found 0",
    INT4_G32 + "steps: [{gptq: {refit: -1}}]": "gptq.refit: input should be greater than or equal to 0, found -1",
    INT4_G32 + "steps: [{awq: {grid: 0}}]": "awq.grid: input should be greater than 0, found 0",
    INT4_G32 + "steps: [{smoothquant: {alpha: 2}}]": "alpha: expected 'auto' or a number from 0 to 1, found 2",
    INT4_G32 + "calibration: {samples: 3}": "calibration has no effect without steps",
    INT4_G32
    + "steps: [gptq]\ncalibration: {samples: 0}": "calibration.samples: expected 'auto' or a number above 0, found 0",
    INT4_G32 + "steps: [gptq]\ncalibration: {sample: 1}": "unknown key 'sample' (did you mean 'samples'?)",
    INT4_G32 + "steps: [gptq]\ncalibration: {data: x.csv}": "calibration.data: expected bundled, a path to a .txt",
    INT4_G32
    + "steps: [gptq: {asymmetric_calibration: 1}]\ncalibration: {inputs: original}": "cannot be combined with a step",
    INT4_G32 + "steps: [autoround]\ncalibration: {inputs: original}": "cannot be combined with a step",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace(INT4_G32, "").replace("\n", "; ")[:50])
def test_every_mistake_is_one_line_with_file_path_and_value(write, text):
    said = message(write(text))
    assert said.startswith("mine.yaml: ")
    assert MISTAKES[text] in said


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in message(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("awq-int", "(did you mean 'awq-int4'?)"),
        ("nowhere.yaml", "is neither a shipped recipe nor a file; shipped: autoround-int4, awq-int4"),
        (".", "is a directory, not a recipe file"),
    ],
)
def test_a_recipe_that_is_not_there_names_those_that_are(name, expected):
    assert expected in message(name)


def test_a_shipped_name_is_not_shadowed_by_a_file_of_the_same_name(tmp_path, monkeypatch):
    (tmp_path / "rtn-int8").write_text("weights: {dtype: int2}")
    monkeypatch.chdir(tmp_path)
    assert load("rtn-int8").scheme.default.weight.dtype == INT8
    assert load("./rtn-int8").scheme.default.weight.dtype.bits == 2


def test_fields_can_be_replaced_from_outside(write):
    path = write(INT4_G32 + "steps: [gptq]")
    changes = ["weights.group_size=64", "steps.gptq.damping=0.05", "calibration.samples=16", "activations.dtype=int8"]
    recipe = load(path, [*changes, "seed=3", "ignore='*.gate'", "weights.group_size=channel"])
    assert recipe.scheme.default.weight.group_size is None
    assert recipe.steps["gptq"].damping == 0.05
    assert recipe.calibration.samples == 16
    assert recipe.scheme.default.activation.dtype == INT8
    assert recipe.seed == 3
    assert recipe.source["ignore"] == ["*.gate"]


def test_replacing_by_mapping_and_by_text_is_the_same(write):
    path = write(INT4_G32 + "steps: [gptq: {damping: 0.1}]")
    by_text = load(path, ["weights.dtype=int8", "steps.gptq.block_size=64", "calibration.data=my.txt"])
    by_mapping = load(path, {"weights.dtype": "int8", "steps.gptq.block_size": 64, "calibration.data": "my.txt"})
    assert by_text == by_mapping
    assert by_text.steps["gptq"].damping == 0.1
    assert load(path, "seed=4") == load(path, ["seed=4"])


@pytest.mark.parametrize(
    ("inputs", "length", "expected"),
    [(64, 512, 32), (1536, 512, 48), (1537, 512, 49), (1536, 256, 96), (14336, 512, 128)],
)
def test_auto_gives_16_tokens_per_input_but_32_to_128_samples(write, inputs, length, expected):
    recipe = load(write(INT4_G32 + f"steps: [gptq]\ncalibration: {{samples: auto, sequence_length: {length}}}"))
    made = with_samples(recipe, inputs)
    assert (recipe.calibration.num_samples, made.calibration.num_samples) == (128, expected)
    assert made == build(made.source, "again")
    assert with_samples(made, 10) is made


def test_whole_parts_can_be_replaced_and_removed(write):
    path = write(INT4_G32 + "activations: {dtype: int8}\nsteps: [gptq]\ncalibration: {samples: 4}")
    recipe = load(path, ["steps=[]", "calibration=null", "activations=null", "weights={dtype: fp8}"])
    assert (recipe.steps, recipe.calibration, recipe.scheme.default.activation) == ({}, None, None)
    assert recipe.scheme.default.weight == WeightScheme(dtype=FP8)
    assert load(path, ["overrides=[{modules: a, skip: true}]"]).scheme.find("a") is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("seed", "has no '='"),
        ("weights.group_size=[", "override 'weights.group_size=[': not valid YAML: line 1"),
        (
            "weights.groupsize=3",
            "(did you mean 'weights.group_size'?); valid fields: weights.dtype, weights.group_size",
        ),
        ("weight.group_size=3", "(did you mean 'weights.group_size'?)"),
        ("weights.group_size.x=3", "no such field"),
        ("weights.group_size=x", "weights.group_size: expected a positive whole number"),
        ("steps.gptq.damp=1", "(did you mean 'steps.gptq.damping'?)"),
        ("steps.awq.grid=1", "the recipe has no step 'awq'; its steps: gptq"),
        ("overrides.0.skip=true", "can only be replaced as a whole"),
    ],
)
def test_a_change_that_does_not_fit_says_what_would(write, change, expected):
    assert expected in message(write(INT4_G32 + "steps: [gptq]"), [change])


def test_changes_do_not_hide_a_mistake_in_the_file(write):
    assert "weights: expected a mapping" not in message(write("weights: 3\nsteps: 4"), ["weights.dtype=int8"])
    assert "steps: expected a list" in message(write("weights: 3\nsteps: 4"), ["weights.dtype=int8"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INT4_G32 + "steps: [gptq]", []),
        (INT4_G32 + "steps: [smoothquant]", ["'activations' is not set"]),
        (INT4_G32 + "steps: [gptq, awq]", ["later steps (awq) have no effect"]),
        (INT4_G32 + "steps: [autoround, gptq]", ["later steps (gptq) have no effect"]),
        (INT4_G32 + "activations: {dtype: fp8}", []),
        ("weights: {dtype: int8}\nactivations: {dtype: fp8}", ["int8 weights with fp8 activations"]),
    ],
)
def test_check_remarks_on_what_is_valid_but_hardly_meant(write, text, expected):
    remarks = check(write(text))
    assert len(remarks) == len(expected)
    assert all(part in remark for part, remark in zip(expected, remarks, strict=True))


BLOCKS = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_documentation_has_examples():
    assert len(BLOCKS) >= 4


def test_the_documentation_names_every_field_and_every_option():
    text = DOCS.read_text(encoding="utf-8")
    for name, step in REGISTRY.all().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for field in dataclasses.fields(step):
            default = field.default if isinstance(field.default, str) else str(field.default).lower()
            assert re.search(rf"`{field.name}` \(`?{re.escape(default)}`?[;)]", row), field.name
    sections = {
        "": Document,
        "weights.": WeightsSection,
        "activations.": ActivationsSection,
        "calibration.": CalibrationSection,
    }
    sections |= {"kv_cache.": KVCacheSection, "measured.": Measured}
    for prefix, section in sections.items():
        for name in section.model_fields.keys() - {
            "weights",
            "activations",
            "calibration",
            "kv_cache",
            "measured",
            "mtp",
        }:
            assert f"\n| `{prefix}{name}` |" in text, prefix + name


@pytest.mark.parametrize("text", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_of_the_documentation_loads_without_remarks(write, text):
    assert check(write(text)) == []


def test_gates_are_read_checked_and_no_part_of_the_identity(write):
    text = INT4_G32 + "gates: [recovery >= 98.9, 'kl<=0.05']"
    recipe = load(write(text))
    assert recipe.gates == ("recovery>=98.9", "kl<=0.05")
    assert recipe.source == load(write(INT4_G32)).source
    assert load(write(INT4_G32 + "gates: 'kl<=0.05'")).gates == ("kl<=0.05",)
    with pytest.raises(RecipeError, match=r"gates: gate 'recoverie>=98': unknown metric 'recoverie' \(did you mean"):
        load(write(INT4_G32 + "gates: ['recoverie>=98']"))
    with pytest.raises(RecipeError, match="gates: expected a gate such as"):
        load(write(INT4_G32 + "gates: {kl: 1}"))


def test_a_file_that_is_nearly_named_is_suggested(write, tmp_path):
    write(INT4_G32)
    assert f"(did you mean {str(tmp_path / 'mine.yaml')!r}?)" in message(tmp_path / "mine.yml")
    assert "(did you mean 'awq-int4'?)" in message("awq-in4")


def test_a_copy_that_keeps_a_shipped_name_is_called_as_its_file(write):
    copied = write(f"name: gptq-int4\n{INT4_G32}", "mine.yaml")
    assert load(copied).name == "mine"
    assert load(copied, ["name=theirs"]).name == "theirs"
    assert load(write(f"name: my-own\n{INT4_G32}", "other.yaml")).name == "my-own"


def test_changing_the_calibration_of_a_recipe_without_one_does_not_blame_its_file(write):
    said = message("rtn-int4", ["calibration.samples=8"])
    assert said.startswith("recipe 'rtn-int4' uses no calibration data")
    assert "--samples" in said
    assert message(write(f"{INT4_G32}calibration: {{samples: 8}}\n")).startswith("mine.yaml: calibration has no effect")


def test_scales_are_signed_unless_a_recipe_says_no_and_suit_the_kernels_of_int4_with_fp8():
    def weight(name, *changes):
        return load(name, changes).scheme.default.weight

    assert weight("rtn-int4").signed_scales and not weight("rtn-int4", "weights.signed_scales=false").signed_scales
    assert load("rtn-int4", ["weights.signed_scales=false"]).source["weights"]["signed_scales"] is False
    assert weight("w4a8-fp8").row_scales == "e4m3"
    assert not weight("w4a8-fp8", "activations.dtype=int8").row_scales
    assert not weight("gptq-int4").row_scales
