"""What an engine says about itself: counts since the start, and how it runs."""

from typing import Any

from quantkit.kernels import cpu, gpu
from quantkit.runtime.cache import policies
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.first_run import describe_kernels
from quantkit.runtime.model.cache_schemes import cache_type


def kv_type(engine: Engine) -> str:
    """Number type of the cache: as asked for, or what the checkpoint says where that was `auto`."""
    cache, asked = engine.runner.cache, engine.config.kv_cache
    return asked if cache is None else cache_type(cache.layouts, asked)


def stats(engine: Engine) -> dict[str, Any]:
    """Sizes, and counts since the start."""
    controller, cache = engine.controller, engine.runner.cache
    return {
        "weight_bytes": engine.model.num_bytes,
        "kv_bytes": 0 if cache is None else cache.num_bytes + cache.residual_bytes,
        "kv_tokens": engine.pool.num_pages * engine.config.page_size,
        "kv_pages": engine.pool.num_pages,
        "kv_free_pages": engine.pool.num_free,
        "kv_cache": kv_type(engine),
        "kv_budget": None if engine.eviction is None else engine.eviction.budget.tokens,
        "kv_evicted_pages": 0 if engine.eviction is None else engine.eviction.num_evicted_pages,
        "prefix_hit_tokens": engine.prefix.num_hit_tokens,
        "prefix_asked_tokens": engine.prefix.num_asked_tokens,
        "preemptions": engine.scheduler.num_preemptions,
        "drafted_tokens": 0 if controller is None else controller.num_drafted,
        "accepted_tokens": 0 if controller is None else controller.num_accepted,
        "acceptance": None if controller is None else controller.acceptance,
    }


def describe_engine(engine: Engine, threads: str) -> dict[str, str]:
    """What a user should know about how it runs, by topic.

    Args:
        engine: to describe.
        threads: how many and why; empty where that was not decided here.
    """
    counts, model = stats(engine), engine.model
    topics = {"computed in": f"{str(model.dtype).removeprefix('torch.')} on {model.device}"}
    if model.device.type == "cpu":
        topics["CPU kernels"] = cpu.status()
    elif gpu.is_used(model.device):
        topics["GPU kernels"] = describe_kernels(model.device)
    if threads:
        topics["threads"] = threads
    if (graphs := engine.runner.graph_status) is not None:
        topics["CUDA graphs"] = graphs
    if (eviction := engine.eviction) is not None:
        policy, evicted = engine.config.kv_policy or policies.DEFAULT, counts["kv_evicted_pages"]
        topics["KV budget"] = f"{eviction.budget.tokens} tokens of a sequence, {policy}; {evicted} pages evicted"
    if counts["prefix_hit_tokens"]:
        topics["prefix cache"] = f"{counts['prefix_hit_tokens']} of {counts['prefix_asked_tokens']} prompt tokens"
    if counts["preemptions"]:
        topics["preemptions"] = str(counts["preemptions"])
    if engine.controller is not None:
        share = counts["acceptance"]
        topics["speculation"] = "not used" if share is None else f"{share:.0%} of {counts['drafted_tokens']} drafts"
    if model.notes:
        topics["notes"] = "; ".join(model.notes)
    return topics
