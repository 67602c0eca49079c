"""A report as a real run would give it, made up from a seed: a 24-layer model at 4 bits against its original."""

from __future__ import annotations

import dataclasses
import math
import random

from quantkit.results import (
    BehaviourResult,
    BenchmarkResult,
    BenchmarkRun,
    Comparison,
    CompressionResult,
    Diagnosis,
    DriftResult,
    Environment,
    EvaluationResult,
    ExampleRecord,
    FidelityResult,
    Finding,
    LayerRecord,
    LinearRecord,
    MarginRecord,
    MemoryRecord,
    ModelFacts,
    PerplexityResult,
    Report,
    RequestTiming,
    RooflineRecord,
    SampleRecord,
    SensitivityMap,
    SensitivityProposal,
    SensitivityRecord,
    TaskResult,
    Workload,
)
from quantkit.results.gates import evaluate_gates
from quantkit.results.statistics.comparison import compare_evaluations

GATES = ("recovery>=98.9", "perplexity_ratio<=1.05", "kl<=0.02", "top1>=0.97", "itl_ratio<=0.6", "memory_ratio<=0.35")
TASKS = {"hellaswag": (1000, 0.58), "piqa": (800, 0.76), "arc_easy": (600, 0.71), "demo_facts": (240, 0.93)}
LAYERS = 24
GROUPS = {
    "q/k/v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate/up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def tasks(seed: int, lost: float, won: float) -> tuple[TaskResult, ...]:
    """Answers: the original's (lost = won = 0), or those with that share of right answers lost and wrong ones won."""
    answered = []
    for name, (count, accuracy) in TASKS.items():
        original, change = random.Random(name), random.Random(f"{name} {seed}")
        samples = []
        for i in range(count):
            right = original.random() < accuracy
            right = change.random() >= lost if right else change.random() < won
            tokens = max(1, round(original.gauss(24, 6) + (change.gauss(0, 2) if lost else 0)))
            samples.append(
                SampleRecord(
                    task=name,
                    index=i,
                    scores={"acc": float(right)},
                    answer_tokens=tokens if name == "demo_facts" else None,
                    item_hash=f"{name}{i:05d}",
                )
            )
        value = sum(s.scores["acc"] for s in samples) / count
        error = math.sqrt(value * (1 - value) / (count - 1))
        answered.append(
            TaskResult(task=name, metric="acc", value=value, stderr=error, num_samples=count, samples=tuple(samples))
        )
    return tuple(answered)


def perplexity(seed: int, shift: float, through: str = "prefill") -> PerplexityResult:
    text, change = random.Random("text"), random.Random(seed)
    nll = [(2.31 + text.gauss(0, 0.2)) * 511 for _ in range(40)]
    return PerplexityResult(
        data="demo-heldout",
        window=512,
        stride=512,
        through=through,
        window_nll=tuple(value + 511 * (shift + change.gauss(0, abs(shift) / 4)) for value in nll),
        window_tokens=(511,) * 40,
    )


def rates(seed: int, changed: float) -> tuple[TaskResult, ...]:
    """Sampled behaviour of 60 answers: the original's (changed = 0), or with that share of the bits turned."""
    results = []
    shares = {
        "unended": 0.4,
        "loop_rate": 0.1,
        "empty": 0.05,
        "other_script": 0.05,
        "right_format": 0.6,
        "valid_calls": 0.8,
    }
    for name, share in shares.items():
        original, change = random.Random(name), random.Random(f"{name} {seed}")
        values = [(original.random() < share) != (change.random() < changed) for _ in range(60)]
        samples = tuple(
            SampleRecord(
                task=name,
                index=index,
                scores={"rate": float(value)},
                item_hash=f"{name}{index:05d}",
                answer_tokens=80 + index if name == "unended" else None,
            )
            for index, value in enumerate(values)
        )
        results.append(
            TaskResult(
                task=name,
                metric="rate",
                value=sum(values) / 60,
                stderr=0.05,
                num_samples=60,
                higher_is_better=name in ("right_format", "valid_calls"),
                samples=samples,
            )
        )
    return tuple(results)


def behaviour(share: float) -> BehaviourResult:
    """Decisions with that share of the original's margins left; the refusals are too few."""
    counts = {"tool": 20, "end": 41, "json": 14, "refusal": 3}
    margins = tuple(
        MarginRecord(
            kind=kind,
            num_decisions=2 * count,
            num_prompts=count,
            baseline=6.0,
            value=6.0 * share,
            flips=round((1 - share) / 2, 3),
            **({"ratio": share, "low": share - 0.03, "high": share + 0.03} if count > 7 else {}),
        )
        for kind, count in counts.items()
    )
    return BehaviourResult(
        prompts="bundled",
        num_prompts=60,
        num_seeds=1,
        num_left_out=4,
        max_tokens=128,
        dialect="hermes",
        num_tokens=5210,
        mean_kl=0.09,
        quarter_kl=(0.07, 0.08, 0.1, None),
        entropy_kl=(0.001, 0.03, 0.1, 0.2),
        entropy_limits=(0.1, 0.8, 2.0),
        margins=margins,
        examples=(
            ExampleRecord(
                prompt="Tea?", original="Yes, with <b>milk</b>.", model="Yes, yes, yes", parted=5, lost="loop_rate"
            ),
        ),
    )


def evaluation(name: str, seed: int, lost: float, won: float, shift: float, arithmetic: str) -> EvaluationResult:
    return EvaluationResult(
        model=name,
        arithmetic=arithmetic,
        tasks=tasks(seed, lost, won),
        perplexity=(perplexity(seed, shift), perplexity(seed + 1, shift, "decode")),
        behaviour=rates(seed, lost),
        settings={"suite": "standard", "limit": "1000", "seed": "0", "chat template": "no", "BOS": "as the tokenizer"},
        seconds=412.0,
    )


def requests(seed: int, base_s: float, slope_s: float, prompt_s: float, count: int, concurrency: int) -> BenchmarkRun:
    rng = random.Random(seed)
    timings, clock = [], 0.0
    for i in range(count):
        prompt = rng.choice((128, 256, 512, 1024))
        arrived = clock
        now = arrived + prompt_s * prompt * (1 + 0.1 * concurrency) + abs(rng.gauss(0, 0.002))
        stamps = [now]
        for step in range(63):
            stall = 0.08 if rng.random() < 0.004 else 0.0
            now += (
                base_s * (1 + 0.12 * concurrency) + slope_s * (prompt + step) + abs(rng.gauss(0, base_s / 15)) + stall
            )
            stamps.append(now)
        timings.append(
            RequestTiming(
                request_id=i, prompt_tokens=prompt, arrived_s=arrived, token_s=tuple(stamps), finished_s=stamps[-1]
            )
        )
        if i % concurrency == concurrency - 1:
            clock = now
    workload = Workload(
        name=f"closed-{concurrency}",
        mode="closed",
        num_requests=count,
        prompt_tokens=1024,
        new_tokens=64,
        concurrency=concurrency,
        ttft_limit_s=0.5,
        tpot_limit_s=0.05,
        num_warmup=2,
    )
    return BenchmarkRun(workload=workload, requests=tuple(timings), rounds=3)


def benchmark(name: str, weights: int, base_s: float, prompt_s: float, decode_flops: float) -> BenchmarkResult:
    rng = random.Random(name)
    points = [
        RooflineRecord(
            phase=phase,
            batch=batch,
            context=512,
            num_tokens=tokens,
            bytes_moved=weights + batch * 512 * 24_576,
            flops=2 * 500_000_000 * tokens,
            seconds=max((weights + batch * 512 * 24_576) / 18e9, 1e9 * tokens / decode_flops) * rng.uniform(1.15, 1.6),
            copy_bytes_per_s=18e9,
            gemm_flops_per_s=95e9,
        )
        for phase, batch, tokens in (("decode", 1, 1), ("decode", 8, 8), ("decode", 32, 32), ("prefill", 1, 512))
    ]
    mib = 2**20
    memory = (
        MemoryRecord(part="weights", predicted_bytes=weights, observed_bytes=weights),
        MemoryRecord(part="kv pool", predicted_bytes=192 * mib, observed_bytes=192 * mib, note="8,192 tokens"),
        MemoryRecord(part="activations", predicted_bytes=38 * mib, observed_bytes=41 * mib),
        MemoryRecord(part="reserve", predicted_bytes=160 * mib, observed_bytes=171 * mib),
        MemoryRecord(part="peak", predicted_bytes=weights + 390 * mib, observed_bytes=weights + 404 * mib),
    )
    return BenchmarkResult(
        model=name,
        runs=(requests(1, base_s, 9e-7, prompt_s, 24, 1), requests(2, base_s, 9e-7, prompt_s, 32, 8)),
        memory=memory,
        roofline=tuple(points),
        kv_cache="int8" if "int4" in name else "bf16",
        capacity_tokens=8192,
        device="AMD EPYC, 2 cores",
        settings={"threads": "2", "page size": "64", "token budget": "512"},
    )


def sensitivity(scale: float = 1.0) -> SensitivityMap:
    rng = random.Random(7)
    records = []
    for layer in range(LAYERS):
        for group, names in GROUPS.items():
            kl = scale * 10 ** rng.gauss(-3.7, 0.25)
            if group == "down" and layer in (1, LAYERS - 1):
                kl *= 14  # as in real models: the first and last down projections see massive activations
            block = "mlp" if group in ("gate/up", "down") else "self_attn"
            modules = tuple(f"model.layers.{layer}.{block}.{name}" for name in names)
            records.append(
                SensitivityRecord(
                    layer=layer, group=group, modules=modules, kl=kl, quantized_bytes=540_000, dense_bytes=2_097_152
                )
            )
    total = sum(record.kl for record in records) * 1.07
    worst = sorted(records, key=lambda r: r.kl, reverse=True)[:2]
    proposal = SensitivityProposal(
        action="ignore",
        groups=tuple((record.layer, record.group) for record in worst),
        overrides=(f"ignore=[{', '.join(m for record in worst for m in record.modules)}]",),
        predicted_kl=total - sum(record.kl for record in worst),
        extra_bytes=2 * 1_557_152,
    )
    return SensitivityMap(
        data="demo-heldout", num_tokens=8192, records=tuple(records), total_kl=total, proposal=proposal
    )


def compression() -> CompressionResult:
    rng = random.Random(3)
    layers = tuple(
        LayerRecord(
            index=i,
            name=f"model.layers.{i}",
            linears=tuple(
                LinearRecord(
                    name=f"mlp.{name}",
                    scheme="int4 g128",
                    shape=(1024, 1024),
                    bits_per_weight=4.156,
                    rounding_error=rng.uniform(0.07, 0.1),
                    error=rng.uniform(0.04, 0.07),
                    measure="output",
                )
                for name in ("gate_proj", "up_proj", "down_proj")
            ),
            output_snr_db=rng.uniform(22, 30),
            notes=(),
        )
        for i in range(LAYERS)
    )
    return CompressionResult(
        model="acme/tiny-500m",
        output="tiny-500m-awq-int4",
        recipe="awq-int4",
        format="compressed-tensors",
        num_layers=LAYERS,
        num_quantized=LAYERS * 7,
        ignored=("lm_head",),
        bits_per_weight=4.156,
        source_bytes=988_000_000,
        output_bytes=331_000_000,
        layers=layers,
        warnings=(),
        seconds={"load": 4.2, "steps": 151.0, "write": 3.3},
        peak_bytes=1_200_000_000,
        resumed_layers=0,
    )


_SHARES = {"baseline": 0.8, "value": 0.77, "difference": -0.03, "low": -0.05, "high": -0.01, "p_value": None}
DRAFTS = Comparison(subject="accepted drafts: all", metric="share", num_samples=1200, verdict="worse", **_SHARES)


def make_report(*, broken: bool = False, gates: tuple[str, ...] = GATES, name: str = "tiny-500m-awq-int4") -> Report:
    """A checkpoint that holds its gates, or (`broken`) one that loses too much."""
    lost, won, shift = (0.09, 0.02, 0.11) if broken else (0.012, 0.015, 0.012)
    ours = evaluation(name, 11, lost, won, shift, "bfloat16")
    original = evaluation("acme/tiny-500m", 0, 0.0, 0.0, 0.0, "bfloat16")
    noise = evaluation("acme/tiny-500m", 5, 0.003, 0.004, 0.0006, "float32")
    sensitivity_map = sensitivity(6.0 if broken else 1.0)
    report = Report(
        model=ModelFacts(
            name=name,
            path=f"out/{name}",
            format="compressed-tensors",
            num_parameters=494_000_000,
            num_bytes=331_000_000,
            bits_per_weight=4.156,
            architecture="Qwen2ForCausalLM",
            scheme="int4 g128 asymmetric",
            license="apache-2.0",
        ),
        baseline_model=ModelFacts(
            name="acme/tiny-500m",
            hub_id="acme/tiny-500m",
            num_parameters=494_000_000,
            num_bytes=988_000_000,
            architecture="Qwen2ForCausalLM",
            license="apache-2.0",
        ),
        compression=compression(),
        evaluation=ours,
        baseline=original,
        noise=noise,
        comparisons=(*compare_evaluations(ours, original, noise), DRAFTS),
        fidelity=FidelityResult(
            data="demo-heldout",
            num_tokens=8192,
            mean_kl=0.094 if broken else 0.0131,
            p99_kl=1.2 if broken else 0.151,
            max_kl=3.1 if broken else 0.82,
            top1_agreement=0.891 if broken else 0.9742,
            first_divergence=(12, 40, None, 3, 55, None, 31, 64),
            greedy_tokens=128,
        ),
        drift=DriftResult(
            num_texts=8,
            num_tokens=2000,
            ends=(500, 1000, 1500, 2000),
            part_kl=(0.011, 0.012, 0.014, 0.016),
            text_kl=(0.013,) * 8,
            slope=0.0033,
            slope_low=0.0021,
            slope_high=0.0045,
            first_difference=(12, 40, None, 9, 77, 31, 18, 5),
        ),
        noise_fidelity=FidelityResult(
            data="demo-heldout", num_tokens=8192, mean_kl=0.00012, p99_kl=0.0011, top1_agreement=0.9988
        ),
        behaviour=behaviour(0.55 if broken else 0.96),
        sensitivity=sensitivity_map,
        benchmark=benchmark(name, 331_000_000, 0.0165, 0.00012, 70e9),
        baseline_benchmark=benchmark("acme/tiny-500m", 988_000_000, 0.0535, 0.00011, 80e9),
        diagnosis=Diagnosis(
            findings=(
                Finding(
                    statement="Streaming is bound by memory: each token reads every weight once",
                    evidence="at batch 1 a step moves 344 MB in 24.1 ms, 79 % of the copy bandwidth measured here",
                    advice="quantize the output head to 8 bits with --head-dtype int8",
                    expected_gain="about 1.3x at batch 1",
                ),
                Finding(
                    statement="From a batch of about 12 on, 4-bit weights no longer pay",
                    evidence="at batch 32 both models reach 70 % of the matrix-product rate",
                    advice="use 8-bit weights and activations for batches",
                ),
            )
        ),
        environment=Environment(
            versions={"quantkit": "0.1.0", "python": "3.12.3", "torch": "2.13.0", "transformers": "5.1.0"},
            platform="Linux x86_64",
            cpu="AMD EPYC 9B14",
            num_threads=2,
            seeds={"evaluation": 0, "workload": 0},
            hashes={"checkpoint": "9f2c4e5d7a10b3c8", "source": "1b7d90aa42fe6c35", "data": "77aa0c1d2e3f4051"},
            command="quantkit verify tiny-500m-awq-int4 --baseline acme/tiny-500m --suite standard",
        ),
        notes=("Layer 3: damping was raised to 0.05 for mlp.down_proj.",),
    )
    return dataclasses.replace(report, gates=tuple(evaluate_gates(report, gates)))
