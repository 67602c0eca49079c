"""Options of a benchmark, without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantkit.errors import RequestError
from quantkit.settings import setting

if TYPE_CHECKING:
    from quantkit.results import Workload

ROUNDS_AGAINST = 4  # default with --against


def _goodput_limit(metric: str, flag: str) -> Any:
    text = f"Largest {metric} with which a request counts as goodput."
    return setting(None, text, flag=f"{flag} SECONDS", above=0, kind=float)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkOptions:
    """Settings of a benchmark. The help text of each field describes it; `static` adds runs in static batches.

    Raises:
        RequestError: a number is out of range, or there is nothing to measure.
    """

    concurrencies: tuple[int, ...] = setting(
        (1, 8), "Number of requests in flight at the same time.", flag="--batch N,...", minimum=1, commas=True
    )
    rates: tuple[float, ...] = setting(
        (),
        "Mean number of requests per second, with random (Poisson) arrivals.",
        flag="--rate R,...",
        above=0,
        kind=float,
        commas=True,
    )
    prompt_tokens: int = setting(256, "Tokens in each prompt.", flag="--prompt-tokens", minimum=1)
    new_tokens: int = setting(128, "Tokens generated for each request.", flag="--new-tokens", minimum=1)
    num_requests: int | None = setting(
        None, "Requests in each run.", flag="--requests", minimum=1, shown="2 x batch, at least 4"
    )
    spread: float = setting(
        0.0, "Spread of lengths: 0.8 draws them uniformly from 20 to 100 %.", flag="--spread", minimum=0, below=1
    )
    static: bool = False
    rounds: int = setting(
        1, "Repetitions of every run.", flag="--rounds", minimum=1, shown=f"1; {ROUNDS_AGAINST} with --against"
    )
    ttft_limit_s: float | None = _goodput_limit("TTFT", "--ttft-limit")
    tpot_limit_s: float | None = _goodput_limit("TPOT", "--tpot-limit")
    seed: int = setting(0, "Seed of prompts and arrivals.", flag="--seed", minimum=0)

    def __post_init__(self) -> None:
        counts = {
            "concurrency": min(self.concurrencies, default=1),
            "number of rounds": self.rounds,
            "prompt length": self.prompt_tokens,
            "number of new tokens": self.new_tokens,
            "number of requests": 1 if self.num_requests is None else self.num_requests,
        }
        for name, value in counts.items():
            if value < 1:
                raise RequestError(f"the {name} is {value}; it must be at least 1")
        if not self.concurrencies and not self.rates:
            raise RequestError("nothing to measure: give --batch or --rate (in Python: concurrencies or rates)")
        if not all(rate > 0 for rate in self.rates):
            raise RequestError(f"the rates are {self.rates}; each must be above 0 requests per second")
        if not 0 <= self.spread < 1:
            raise RequestError(f"spread is {self.spread}; it must be at least 0 and below 1")

    @property
    def max_sequences(self) -> int:
        """Number of requests that the engine must be able to run at the same time."""
        return max([*self.concurrencies, *(32 for _ in self.rates)])

    def workloads(self) -> list[Workload]:
        """Return the workloads to measure; if a workload has a concurrency of 1, the length sweep is the last."""
        from quantkit.benchmark.workload import STATIC, closed_loop, length_sweep, poisson  # late, for a fast --help

        sizes = {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, "seed": self.seed}
        requests: dict[str, Any] = {**sizes, "num_requests": self.num_requests}
        loads = [closed_loop(number, **requests) for number in dict.fromkeys(self.concurrencies)]
        if self.static:
            loads += [replace(load, name=f"{STATIC}{load.concurrency}") for load in loads]
        loads += [poisson(rate, **requests) for rate in dict.fromkeys(self.rates)]
        limited = [replace(w, ttft_limit_s=self.ttft_limit_s, tpot_limit_s=self.tpot_limit_s) for w in loads]
        return [*limited, length_sweep(**sizes)] if 1 in self.concurrencies else limited
