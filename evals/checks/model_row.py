"""One row of the table of models: a tiny model, written by each recipe, beside the truth.

The truth needs nothing of the code that wrote: the source's own tensors, in which every matrix that the codes of a
checkpoint decode to replaces the one that it resembles, wherever that is (a matrix, a transposed one, an expert's,
a half of a fused one). Loaded by transformers, it is what the checkpoint must be equal to.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny_models
import torch
from likeness import put_changed, put_decoded
from make_random_llama import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPT, NEW_TOKENS = 24, 8
EXACT = 1e-3  # largest difference of logits, of their standard deviation: float32 in another order
NOISY = 0.97  # median correlation of logits at least where activations are rounded, of 8 bits
KEPT = 0.8  # the same for the source and a checkpoint of 8 bits, whatever moved between tensors
ONLY_ROUND = {"gptq"}  # steps that change nothing but the codes
UNREAD = re.compile(r"transformers( [\d.]+:| does not load)")  # of a checkpoint that only engines read
_NEEDS = r"required positional|have to specify|must specify|has to be not-None|is required|be provided"
ROUNDED = {4: 0.2, 8: 0.05}  # relative error of a matrix of normal numbers at most, by bits, rounded to the nearest
SAMPLES = {"calibration.samples": 4, "calibration.sequence_length": 32}


def make_row(name: str, folder: Path, recipes: list[str]) -> dict[str, Any]:
    """Everything about one model.

    Args:
        name: of the row, see `tiny_models.rows`.
        folder: empty, to work in.
        recipes: names of shipped ones.
    """
    spec = tiny_models.rows()[name]
    row: dict[str, Any] = {"class": spec.kind, "task": spec.task, "recipes": {}}
    try:
        truth, row["decoder"] = _source(spec, folder / "source")
    except Exception as error:  # of transformers: the table says which
        return {**row, "built": _line(error)}
    row["built"] = "yes"
    if truth is None:
        return row
    row["parameters"] = truth.size
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"input_ids": ids}) for ids in _samples()))
    row["source"] = _run(folder / "source", truth, 1.0)
    for recipe in recipes:
        row["recipes"][recipe] = _recipe(spec, recipe, folder, truth)
    return row


class Truth:
    """A model as transformers computes it: logits of the prompt, and the tokens that follow it.

    Args:
        model: in evaluation mode.
        inputs: scheme of the inputs of quantized linears, None = they are not rounded.
        matrices: the weights of those linears.
    Attributes:
        rounded: logits of the prompt with those inputs rounded, as `logits` where none are.
    """

    def __init__(self, model: Any, inputs: Any = None, matrices: Iterable[Tensor] = ()) -> None:
        self.size = sum(parameter.numel() for parameter in model.parameters())
        # Of some models transformers computes something else with a cache than without; both are its own.
        self.answers = [_computed_again(model)]
        with suppress(Exception):  # of classes that cannot generate
            self.answers.append(_generated(model))
        # Of the prompt alone: a model may compute a position differently beside later ones.
        self.logits = _logits(model, _prompt())
        if inputs is not None:
            _round_inputs(model, inputs, {float(matrix.double().sum()) for matrix in matrices})
        self.rounded = _logits(model, _prompt())

    def compare(self, tokens: Iterable[int], logprobs: Iterable[float]) -> tuple[int, float]:
        """Greedy tokens that agree, and the largest difference of log-probabilities, with the nearer answer."""
        given, values = list(tokens), list(logprobs)
        return max(
            (
                (
                    sum(a == b for a, b in zip(given, known, strict=True)),
                    max(abs(a - b) for a, b in zip(values, expected, strict=True)),
                )
                for known, expected in self.answers
            ),
            key=lambda pair: (pair[0], -pair[1]),
        )

    def correlation(self, logits: Tensor) -> float:
        """Of a checkpoint with rounded inputs: a model that chooses by its inputs may choose as either of the two."""
        return round(max(_correlation(logits, self.logits), _correlation(logits, self.rounded)), 4)


Answer = tuple[list[int], list[float]]


def _computed_again(model: Any) -> Answer:
    """Greedy tokens and their log-probabilities, every step from all tokens."""
    ids, logprobs = _prompt(), []
    for _ in range(NEW_TOKENS):
        value, token = _logits(model, ids)[0, -1].log_softmax(-1).max(-1)
        logprobs.append(float(value))
        ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
    return ids[0, PROMPT:].tolist(), logprobs


def _generated(model: Any) -> Answer:
    """The same by transformers' own loop and cache."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    answer = model.generate(_prompt(), attention_mask=torch.ones_like(_prompt()), **settings)
    return answer.sequences[0, PROMPT:].tolist(), [float(step[0].log_softmax(-1).max()) for step in answer.logits]


def _round_inputs(model: Any, inputs: Any, sums: set[float]) -> None:
    """From now on the linears whose weights have these sums see their inputs rounded."""
    from quantkit.numerics.activation_quant import fake_quantize_inputs

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and float(module.weight.double().sum()) in sums:
            module.register_forward_pre_hook(
                lambda _, given: (fake_quantize_inputs(given[0], inputs), *given[1:]),
            )


def _source(spec: tiny_models.Spec, folder: Path) -> tuple[Truth | None, str]:
    """Write a model. "yes" if it is a decoder alone, else why not; raises where transformers does not read it back."""
    if spec.has_encoder:
        return None, "an encoder and a decoder"
    model = tiny_models.build(spec)
    decoder = _is_decoder(model)
    if decoder != "yes":
        return None, decoder
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    loaded, keys = _load(spec, folder)
    truth = Truth(loaded)
    if keys or not _equal(truth.logits, _logits(model, _prompt())):
        raise ValueError(f"transformers reads another model than it wrote {keys}")
    return truth, decoder


def _is_decoder(model: Any) -> str:
    """ "yes" for a text model of one stack: it needs token ids alone, and no position sees a later one."""
    first = _prompt()
    second = first.clone()
    second[0, -1] += 1
    try:
        same = _equal(_logits(model, first)[:, :-1], _logits(model, second)[:, :-1])
    except (TypeError, ValueError) as error:
        if not re.search(_NEEDS, str(error)):
            raise
        return f"needs more than token ids: {_line(error)}"
    return "yes" if same else "positions see later ones"


def _load(spec: tiny_models.Spec, folder: Path) -> tuple[Any, dict[str, list[str]]]:
    model, report = spec.auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    named = ((kind, sorted(map(str, report.get(kind) or []))) for kind in report if kind.endswith("_keys"))
    return model.eval(), {kind: [*keys[:3], f"{len(keys)} in all"] for kind, keys in named if keys}


def _prompt() -> Tensor:
    return torch.randint(40, 250, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def _samples() -> list[list[int]]:
    return torch.randint(40, 250, (8, 40), generator=torch.Generator().manual_seed(2)).tolist()


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and _distance(first, second) < EXACT


def _distance(first: Tensor, second: Tensor) -> float:
    """Largest difference, of the standard deviation; infinite where a number is none."""
    value = float((first - second).abs().max() / second.std())
    return value if value == value else float("inf")


def _correlation(first: Tensor, second: Tensor) -> float:
    """Median over positions."""
    rows = torch.stack([first.flatten(0, 1), second.flatten(0, 1)]).double()
    rows = rows - rows.mean(-1, keepdim=True)
    value = float(torch.cosine_similarity(rows[0], rows[1], dim=-1).median())
    return value if value == value else 0.0


def _recipe(spec: tiny_models.Spec, recipe: str, folder: Path, source: Truth) -> dict[str, Any]:
    """What one recipe makes of the model, and whether it is right."""
    from quantkit import api

    output = folder / recipe
    changes = {**SAMPLES, "calibration.data": str(folder / "data.jsonl")} if api.load_recipe(recipe).calibration else {}
    try:
        result, fitted = _quantize(folder / "source", recipe, output, changes)
    except Exception as error:
        return _refused(error, folder)
    loaded = api.load_recipe(recipe, fitted)
    entry: dict[str, Any] = {"quantized": result.num_quantized, "ignored": len(result.ignored)}
    entry |= {"set": fitted} if fitted else {}
    noise = 1.0 if loaded.scheme.default.activation is None else NOISY
    try:
        entry["share"], entry["error"], truth = _reference(spec, folder, output, loaded)
    except Exception as error:
        return {**entry, "verdict": "wrong", "why": _line(error).replace(str(folder), "")}
    entry["to source"] = round(_correlation(truth.logits, source.logits), 4)
    entry |= _transformers(spec, output, truth, noise)
    entry["run"] = _run(output, truth, noise)
    return {**entry, **_concluded(entry, loaded, result.warnings)}


def _quantize(model: Path, recipe: str, output: Path, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A run, in smaller groups where the recipe's do not fit this model, and these groups."""
    from quantkit import api
    from quantkit.errors import SchemeError

    fitted: dict[str, Any] = {}
    for size in (16, 8, 4, None):  # below 32, which quantkit itself goes down to
        try:
            return api.quantize(model, recipe, output, overrides={**changes, **fitted}, device="cpu"), fitted
        except SchemeError as error:
            if size is None or "does not divide" not in str(error):
                raise
            fitted["weights.group_size"] = size
    raise AssertionError("the last size raises")


def _concluded(entry: Mapping[str, Any], recipe: Any, warnings: Iterable[str]) -> dict[str, str]:
    """The verdict, and why it is not "right"."""
    bits = recipe.scheme.default.weight.dtype.bits
    if not recipe.steps and entry["error"] > ROUNDED[bits]:
        return {"verdict": "wrong", "why": f"a matrix is off by {entry['error']}, more than rounding is"}
    if bits == 8 and entry["to source"] < KEPT:
        return {"verdict": "wrong", "why": f"a correlation of {entry['to source']} with the source, of 8 bits"}
    run = entry["run"]
    said = next((warning for warning in warnings if UNREAD.match(warning)), None)
    if "why" in entry and (said is None or run["verdict"] != "right"):
        return {"verdict": "wrong", "why": entry["why"]}
    if run["verdict"] != "right":
        return {"verdict": run["verdict"], "why": f"in quantkit: {run['why']}"}
    return {"verdict": "quantkit only", "why": str(said)} if "why" in entry else {"verdict": "right"}


def _refused(error: Exception, folder: Path) -> dict[str, Any]:
    from quantkit.errors import AuditError, QuantkitError

    message = _line(error).replace(str(folder), "")
    if isinstance(error, QuantkitError) and not isinstance(error, AuditError):
        return {"verdict": "refused", "why": message}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/quantkit/" in frame.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"verdict": "crash", "why": message + where}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:400]


def _transformers(spec: tiny_models.Spec, output: Path, truth: Truth, noise: float) -> dict[str, Any]:
    """A checkpoint in transformers: `why` where it is wrong."""
    try:
        model, keys = _load(spec, output)
        logits = _logits(model, _prompt())
    except Exception as error:
        return {"why": f"does not load in transformers: {_line(error).replace(str(output), '')}"}
    said = _judged(logits, truth, noise)
    wrong = f"transformers loads it with {keys}" if keys else said.pop("why", "")
    return {"transformers": said, **({"why": wrong} if wrong else {})}


def _judged(logits: Tensor, truth: Truth, noise: float) -> dict[str, Any]:
    distance = _distance(logits, truth.logits)
    said: dict[str, Any] = {"distance": float(f"{distance:.2g}")}
    if noise < 1:
        said["correlation"] = truth.correlation(logits)
    right = distance < EXACT if noise == 1 else said["correlation"] > noise
    return said if right else {**said, "why": f"other logits in transformers: {said}"}


def _run(path: Path, truth: Truth, noise: float) -> dict[str, Any]:
    """A folder in quantkit's own `LLM`: natively or not, and whether its greedy tokens are those of transformers."""
    from quantkit import LLM, SamplingParams

    try:
        llm = LLM(path, dtype="float32", kv_cache="auto", threads=1, device="cpu", max_length=64)
        native = llm.model.paged
        said: dict[str, Any] = {"native": native}
        prompt = _prompt()[0].tolist()
        logits = next(iter(llm.score([prompt]))).float()
        settings = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        answer = llm.generate([prompt], settings)[0]
    except Exception as error:
        return _refused(error, path)
    said["tokens"], distance = truth.compare(answer.token_ids, (token.logprob for token in answer.logprobs or ()))
    if noise == 1:
        said["distance"] = float(f"{distance:.2g}")
        right = said["tokens"] == NEW_TOKENS and distance < EXACT
    else:
        said["correlation"] = truth.correlation(logits[None])
        right = said["correlation"] > noise
    why = {} if right else {"why": f"other tokens or logits: {said}"}
    return {**said, "verdict": "right" if right else "wrong", **why}


def _reference(spec: tiny_models.Spec, folder: Path, output: Path, recipe: Any) -> tuple[float, float, Truth]:
    """Share of the decoder's weights that are quantized, the worst error of one, and what the codes stand for."""
    from quantkit.compress.convert.source import open_source

    state = load_file(folder / "source" / "model.safetensors")
    written = open_source(output)
    matrices = {module: written.weight(module).dequantize() for module in written.linears}
    share = sum(matrix.numel() for matrix in matrices.values()) / _decoder_size(state, list(matrices))
    worst = max(put_decoded(state, f"{module}.weight", matrix) for module, matrix in matrices.items())
    if set(recipe.steps) - ONLY_ROUND:
        others = [name for module in written.modules if module not in matrices for name in written.names(module)]
        for name in [*others, *(f"{module}.bias" for module in matrices if f"{module}.bias" in written.reader)]:
            put_changed(state, name, written.reader.tensor(name))
    reference = folder / "reference"
    reference.mkdir(exist_ok=True)
    save_file(state, reference / "model.safetensors", {"format": "pt"})
    (reference / "config.json").write_text((folder / "source" / "config.json").read_text())
    inputs = recipe.scheme.default.activation
    return round(share, 4), round(worst, 4), Truth(_load(spec, reference)[0], inputs, matrices.values())


def _decoder_size(state: Mapping[str, Tensor], modules: list[str]) -> int:
    """Elements of all matrices in the layers among which a quantized module is."""
    lists = {re.split(r"\.\d+\.", module)[0] for module in modules}
    return sum(v.numel() for k, v in state.items() if v.dim() > 1 and re.split(r"\.\d+\.", k)[0] in lists)
