"""Adapters on top of weights: the logits of PEFT, whatever else is in the batch, and pages that no other one finds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.api import quantize
from quantkit.errors import InputError, ModelError, RequestError
from quantkit.runtime.config import EngineConfig, adapter_folders
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.adapters import AdaptedLinear, Adapters
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import PromptScoring, SamplingParams
from tests.checkpoints.adapters import make_adapter
from tests.helpers import load_tensors, save_tokenizer
from tests.runtime.helpers import difference, make_loud_model, prompts, run

CLOSE, FAR = 1e-4, 1e-2
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every linear": ("llama", {}),
    "rank 16, with biases in the base": ("qwen2", {"r": 16}),
    "some linears of fused ones": ("llama", {"target_modules": ["v_proj", "up_proj"]}),
    "a rank and a scale for each": (
        "qwen3",
        {"rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 7}, "alpha_pattern": {"k_proj": 3}},
    ),
    "rslora": ("llama", {"use_rslora": True}),
    "one layer": ("llama", {"target_modules": list(EVERY), "layers_to_transform": [1]}),
    "fused in the file": ("phi3", {}),
    "rows in another order": ("gpt_neox", {}),
    "norms after": ("gemma3_text", {}),
    "side by side": ("cohere", {}),
    "recurrent": ("qwen3_next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]}),
    "latent": ("deepseek_v3", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    "shared expert": ("qwen2_moe", {"target_modules": ["q_proj", "shared_expert.up_proj", "shared_expert.down_proj"]}),
}


def make_peft(base: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """An adapter that PEFT has saved, with A and B that matter."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            loud = 0.3 if "lora_B" in name else parameter.shape[1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * loud
    model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Logits (length, V) at every position, by transformers with PEFT in float32."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([sequence])).logits[0].float() for sequence in sequences]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(tmp_path, case):
    family, config = CASES[case]
    base = make_loud_model(tmp_path / "base", family)
    adapter = make_peft(base, tmp_path / "adapter", **config)
    sequences = prompts(1, 40, 100)
    expected = peft_logits(base, adapter, sequences)
    model = load_model(base, dtype="float32", adapters={"a": adapter})
    assert difference(run(model, sequences, adapters="aaa"), expected) < CLOSE
    plain = run(load_model(base, dtype="float32"), sequences)
    assert difference(plain, expected) > FAR
    # In chunks, beside a sequence without an adapter.
    mixed = run(model, sequences, 7, adapters=["a", None, "a"])
    assert difference(mixed, [expected[0], plain[1], expected[2]]) < CLOSE


def test_a_quantized_base(tmp_path):
    """The adapter changes no code: the logits are those of PEFT on the decoded weights."""
    source = make_loud_model(tmp_path / "source", "llama")
    for format_ in ("compressed-tensors", "dense"):
        quantize(source, "rtn-int4", tmp_path / format_, overrides={"weights.group_size": 16, "format": format_})
    adapter = make_peft(source, tmp_path / "adapter", target_modules=list(EVERY))
    sequences = prompts(40, 100)
    model = load_model(tmp_path / "compressed-tensors", dtype="float32", adapters={"a": adapter})
    expected = peft_logits(tmp_path / "dense", adapter, sequences)
    assert difference(run(model, sequences, 32, adapters="aa"), expected) < CLOSE
    assert difference(run(model, sequences, 32), expected) > FAR


def test_inputs_that_the_base_rounds_reach_the_adapter_unrounded(tmp_path):
    source = make_loud_model(tmp_path / "source", "llama")
    quantize(source, "fp8-dynamic", tmp_path / "codes")
    adapter = make_adapter(tmp_path / "adapter", source, EVERY, rank=4, lora_alpha=400)
    model = load_model(tmp_path / "codes", dtype="float32", adapters={"a": adapter})
    linear, update = model.blocks[1].mlp.down, model.adapters.by_name["a"].updates["model.layers.1.mlp.down_proj"]
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(0))
    plain = linear(x)
    assert (plain - x @ load_tensors(source)["model.layers.1.mlp.down_proj.weight"].T).abs().max() > 1e-3
    model.adapters.rows, model.adapters.num_rows = {"a": slice(1, 3)}, 5
    added = linear(x) - plain
    assert torch.allclose(added[1:3], 100 * (x[1:3] @ update.a.T) @ update.b.T, atol=1e-4)
    assert not added[[0, 3, 4]].any()


def test_a_gguf_base_adds_the_same(tmp_path):
    """llama.cpp stores the rows of q and k in another order, in which B's rows are not."""
    source = make_loud_model(tmp_path / "source", "llama")
    save_tokenizer(source)
    overrides = {"weights.group_size": 32, "format": "gguf"}
    quantize(source, "rtn-int8", tmp_path / "m.gguf", overrides=overrides)
    adapter = make_adapter(tmp_path / "adapter", source, EVERY, rank=4, lora_alpha=400)
    added = []
    for path in (source, tmp_path / "m.gguf"):
        model = load_model(path, dtype="float32", adapters={"a": adapter})
        linear, x = model.blocks[0].attention.qkv, torch.ones(2, 64)
        plain = linear(x)
        model.adapters.rows, model.adapters.num_rows = {"a": slice(0, 2)}, 2
        added.append(linear(x) - plain)
    assert added[0].abs().max() > 1
    assert torch.allclose(*added, atol=1e-4)


@pytest.fixture(scope="module")
def adapters(loud_llama, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder / name, loud_llama, EVERY, rank=rank, lora_alpha=alpha)
        for name, rank, alpha in (("one", 4, 400), ("two", 16, 1200))
    }


WHO = ["one", None, "two", "one", "one", None, "two", "two", None, "one"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"token_budget": 8, "max_sequences": 4, "page_size": 16},
    {"page_size": 16, "num_pages": 12, "max_length": 90},
    {"speculate": "ngram", "force_speculation": True},
    {"overlap": True},
    {"kv_cache": "int8", "page_size": 16},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_requests_of_all_adapters_share_steps(loud_llama, adapters, settings):
    """Each gives the tokens that it gives alone in an engine that has no other adapter."""
    llm = LLM(loud_llama, dtype="float32", threads=1, adapters=adapters, **settings)
    asked = prompts(*(5 + 7 * number for number in range(len(WHO))), vocab_size=258)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, adapter=name) for name in WHO]
    together = llm.generate(asked, params)
    llm.engine.check_integrity()
    by_adapter: dict[str | None, LLM] = {
        name: LLM(
            loud_llama,
            dtype="float32",
            threads=1,
            adapters={} if name is None else {name: adapters[name]},
            adapter=name,
            kv_cache=settings.get("kv_cache", "auto"),
            **({"page_size": 16} if "kv_cache" in settings else {}),
        )
        for name in (None, *adapters)
    }
    for prompt, name, completion in zip(asked, WHO, together, strict=True):
        (alone,) = by_adapter[name].generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
        assert completion.token_ids == alone.token_ids, name
    texts = {by_adapter[name].generate([asked[-1]])[0].token_ids for name in by_adapter}
    assert len(texts) == 3, "the adapters change nothing"


@pytest.mark.parametrize("chunk", [None, 1, 16])
def test_scores_in_one_batch_are_those_of_each_alone(loud_llama, adapters, chunk):
    """Also one token at a time, which is the decode path."""
    llm = LLM(loud_llama, dtype="float32", threads=1, adapters=adapters)
    asked = prompts(*range(20, 20 + len(WHO)), vocab_size=258)

    def scored(prompts: Sequence[list[int]], names: Sequence[str | None]) -> list[Tensor]:
        """Return the logits of each prompt."""
        found: list[dict[int, Tensor]] = [{} for _ in prompts]
        params = [
            SamplingParams(
                max_tokens=0,
                adapter=name,
                scoring=PromptScoring(read_logits=partial(keep, rows), chunk_size=chunk),
            )
            for name, rows in zip(names, found, strict=True)
        ]
        llm.generate(prompts, params)
        return [torch.cat([rows[first] for first in sorted(rows)]) for rows in found]

    together = scored(asked, WHO)
    for prompt, name, logits in zip(asked, WHO, together, strict=True):
        (alone,) = scored([prompt], [name])
        assert torch.allclose(logits, alone, atol=1e-4, rtol=1e-5)


def keep(found: dict[int, Tensor], first: int, rows: Tensor) -> None:
    found[first] = rows.clone()


def test_pages_of_one_adapter_are_not_found_by_another(loud_llama, adapters):
    llm = LLM(loud_llama, dtype="float32", threads=1, adapters=adapters, page_size=16)
    alone = LLM(loud_llama, dtype="float32", threads=1, adapters=adapters, prefix_cache=False)
    (prompt,) = prompts(70, vocab_size=258)
    for name in (None, "one", "two"):
        params = SamplingParams(max_tokens=8, ignore_eos=True, adapter=name)
        (expected,) = alone.generate([prompt], params)
        for cached in (0, 64):
            (completion,) = llm.generate([prompt], params)
            assert completion.timing.cached_tokens == cached
            assert completion.token_ids == expected.token_ids
    # The same files under another name are the same adapter.
    again = LLM(loud_llama, dtype="float32", threads=1, adapters={"x": adapters["one"], "y": adapters["one"]})
    assert len(set(again.engine.model.adapters.digests.values())) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_are_one_call_that_gives_the_same_bits(loud_llama, adapters, dtype, monkeypatch):
    """A step whose requests all have the same adapter, or none; other steps run layer by layer."""
    llm = LLM(loud_llama, dtype=dtype, threads=1, adapters=adapters)
    monkeypatch.setenv("QUANTKIT_DECODE_PROGRAM", "0")
    slow = LLM(loud_llama, dtype=dtype, threads=1, adapters=adapters)
    if "no C kernels" in llm.describe()["decode steps"]:
        pytest.skip("no C kernels here")
    told = "one native call; layer by layer where requests of a step have different adapters"
    assert llm.describe()["decode steps"] == told
    assert "adapter two: rank 16, 14 linears, SHA-256 " in llm.describe()["notes"]
    asked, compute = prompts(5, 40, 12, vocab_size=258), llm.model.compute
    layer_by_layer = []
    llm.model.compute = lambda batch, cache: layer_by_layer.append(batch) or compute(batch, cache)
    for who in ((None,) * 3, ("one",) * 3, ("two",) * 3, ("one", None, "one")):
        params = [SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1, adapter=name) for name in who]
        ours, theirs = (each.generate(asked, params) for each in (llm, slow))
        assert [(one.token_ids, one.logprobs) for one in ours] == [(one.token_ids, one.logprobs) for one in theirs]
        assert len(layer_by_layer) == (1 if len(set(who)) == 1 else 9)  # the first step has the prompts
        layer_by_layer.clear()


def test_a_linear_refuses_rows_that_are_not_those_of_the_step(loud_llama, adapters):
    model = load_model(loud_llama, dtype="float32", adapters=adapters)
    linear = model.blocks[0].attention.output
    assert isinstance(linear, AdaptedLinear)
    model.adapters.rows, model.adapters.num_rows = {"one": slice(0, 2)}, 4
    with pytest.raises(AssertionError, match="3 rows of 4 tokens"):
        linear(torch.zeros(3, linear.in_features))


def test_unknown_names(loud_llama, adapters):
    llm = LLM(loud_llama, threads=1, adapters=adapters)
    with pytest.raises(RequestError, match=r"adapter 'three' is not loaded; choose 'one', 'two', or no adapter"):
        llm.generate(["a"], SamplingParams(adapter="three"))
    with pytest.raises(RequestError, match="no adapter is loaded; give --adapter NAME=DIR"):
        Adapters().check("one")
    with pytest.raises(RequestError, match=r"adapter is 'three', which is not among the adapters; choose one of one"):
        EngineConfig(adapters=adapters, adapter="three")
    example = (
        r"'/a/sql', but must be a name in adapters; give, for example, adapters=\{'sql': '/a/sql'\}, adapter='sql'"
    )
    with pytest.raises(RequestError, match=example):
        EngineConfig(adapter="/a/sql")


def test_an_adapter_that_covers_only_the_first_layers_is_noted(loud_llama, adapters, tmp_path, caplog):
    first = make_adapter(tmp_path / "first", loud_llama, ("layers.0.self_attn.q_proj",))
    told = "adapter first covers layer 0 of 2; it may have been trained for a different base"
    notes = LLM(loud_llama, threads=1, adapters={"sql": first}).notes
    assert told in notes
    assert any(note.startswith("adapter sql: folder first, rank 4, 1 linear, SHA-256 ") for note in notes)
    assert caplog.messages == [f"warning: {told}"]
    LLM(loud_llama, threads=1, adapters=adapters)
    assert len(caplog.messages) == 1


def test_names_of_adapters(tmp_path):
    given = ["sql=a/b", str(tmp_path / "chat"), "./x=y/z"]
    assert adapter_folders(given) == {"sql": Path("a/b"), "chat": tmp_path / "chat", "z": Path("./x=y/z")}
    assert adapter_folders({"a": "b"}) == {"a": Path("b")}
    for wrong, message in ((["=a"], "no name"), (["a="], "no folder"), (["a=b", "a=c"], "two adapters are named 'a'")):
        with pytest.raises(RequestError, match=message):
            EngineConfig(adapters=wrong)


def test_models_that_cannot_have_adapters(tmp_path, loud_llama, adapters):
    with pytest.raises(InputError, match=r"runs this model, but quantkit can apply adapters \(one, two\) only"):
        load_model(loud_llama, backend="transformers", adapters=adapters)
    latent = make_loud_model(tmp_path / "latent", "deepseek_v3")
    adapter = make_adapter(tmp_path / "adapter", latent, ("kv_b_proj", "o_proj"))
    with pytest.raises(ModelError, match=r"changes model\.layers\.0\.self_attn\.kv_b_proj.* merge the adapter"):
        load_model(latent, adapters={"a": adapter})
