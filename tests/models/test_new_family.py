"""A new architecture is one new file: quantize, plan, GGUF export, runtime and inspect know it, nothing is edited."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quantkit.api import quantize
from quantkit.compress.convert import convert
from quantkit.errors import InputError, RecipeError
from quantkit.formats.ggml.gguf_file import read_gguf
from quantkit.inspection import inspect
from quantkit.models import families
from quantkit.planning import estimate
from quantkit.runtime.llm import LLM
from tests.helpers import make_model, transformers_logits

FILE = """
# Novel: Llama under other names, with biases on q, k and v.
novel:
  hf_names: [NovelForCausalLM]
  keys: {intermediate_size: feed_width}
  parts:
    input_norm: norm_in
    mlp_norm: norm_mid
    qkv: [mixer.q_proj, mixer.k_proj, mixer.v_proj]
    output: mixer.o_proj
    up: [feed.gate_proj, feed.up_proj]
    down: feed.down_proj
  biases: {qkv: attention_bias, output: attention_bias}
  gguf: {name: llama, interleaved: true}
"""
NAMES = {"input_layernorm": "norm_in", "self_attn": "mixer", "post_attention_layernorm": "norm_mid", "mlp": "feed"}


class NovelConfig(LlamaConfig):
    model_type = "novel"
    attribute_map = {"intermediate_size": "feed_width"}  # noqa: RUF012  # as transformers declares it


class NovelLayer(LlamaDecoderLayer):
    """Llama's layer, its modules registered under other names."""

    def __init__(self, config, index):
        super().__init__(config, index)
        for old, new in NAMES.items():
            self._modules[new] = self._modules.pop(old)

    input_layernorm = property(lambda self: self._modules["norm_in"])
    self_attn = property(lambda self: self._modules["mixer"])
    post_attention_layernorm = property(lambda self: self._modules["norm_mid"])
    mlp = property(lambda self: self._modules["feed"])


class NovelForCausalLM(LlamaForCausalLM):
    config_class = NovelConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(NovelLayer(config, i) for i in range(config.num_hidden_layers))


@pytest.fixture
def novel(tmp_path, monkeypatch):
    """A model of the family, whose file lies in a temporary folder."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "novel.yaml").write_text(FILE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    AutoConfig.register("novel", NovelConfig, exist_ok=True)
    AutoModelForCausalLM.register(NovelConfig, NovelForCausalLM, exist_ok=True)
    return make_model(tmp_path / "model", "novel", attention_bias=True)


@pytest.mark.parametrize("mistake", ["hf_name: [X]", "gguf: {like: shard}"])
def test_a_mistake_in_a_family_file_is_named(tmp_path, monkeypatch, mistake):
    (tmp_path / "novel.yaml").write_text(f"novel:\n  {mistake}\n")
    monkeypatch.setattr(families, "__path__", [str(tmp_path)])
    with pytest.raises(InputError, match=r"novel\.yaml: the family 'novel' is not valid: "):
        families.known()


def test_one_file_makes_a_family_known_everywhere(novel, tmp_path):
    result = quantize(novel, "rtn-int8", tmp_path / "q")
    assert {linear.name for linear in result.layers[0].linears} == {
        *(f"mixer.{name}_proj" for name in "qkvo"),
        *("feed.gate_proj", "feed.up_proj", "feed.down_proj"),
    }

    config = tmp_path / "config.json"
    config.write_text((novel / "config.json").read_text())
    real = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(novel).parameters())
    for model in (novel, config):  # by its headers, and by its config.json alone
        shape = estimate(model).shape
        assert shape.num_parameters == real
        assert not shape.remarks
    assert "mixer.q_proj" in {matrix.name for matrix in estimate(config).shape.layers[0].matrices}
    with pytest.raises(RecipeError, match=r"mixer\.q_proj \(ignored\), mixer\.k_proj .* need one scheme"):
        estimate(config, recipe="rtn-int8", overrides={"ignore": ["*.q_proj"]})

    convert(novel, "gguf", tmp_path / "q.gguf", type_name="q8_0")
    file = read_gguf(tmp_path / "q.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.feed_forward_length"] == json.loads(config.read_text())["feed_width"]
    assert {"blk.1.attn_q.weight", "blk.1.ffn_norm.weight", "blk.0.ffn_gate.weight"} <= set(file.tensors)

    ids = torch.arange(2, 34)[None]
    llm = LLM(novel, backend="native", dtype="float32")
    found = llm.score([ids[0].tolist()])[0]
    torch.testing.assert_close(found, transformers_logits(novel, ids)[0], rtol=0, atol=1e-3)

    summary = inspect(tmp_path / "q")
    assert summary.architecture == "NovelForCausalLM"
    assert {"int8 channel"} <= {row.stored_as for row in summary.modules}
