"""An engine whose steps take known times, on a clock that only its steps and sleeps move."""

from __future__ import annotations

from collections import deque

from quantkit.results import RequestTiming
from quantkit.runtime.types import Completion, StepOutput


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeEngine:
    """A prompt takes a step of `prefill_s`; every step with decoding sequences takes `decode_s`; both add up."""

    def __init__(self, clock, *, prefill_s=0.5, decode_s=0.1, burst=1, reason="length"):
        self.clock, self.prefill_s, self.decode_s, self.burst, self.reason = clock, prefill_s, decode_s, burst, reason
        self.running: dict[int, list[int]] = {}  # number -> [prompt, asked, made]
        self.waiting: deque[int] = deque()
        self.added: list[tuple[float, int, int]] = []
        self.most_running = 0

    @property
    def has_work(self):
        return bool(self.running)

    def add(self, prompt_ids, params):
        assert params.ignore_eos
        number = len(self.added)
        self.added.append((self.clock(), len(prompt_ids), params.max_tokens))
        self.running[number] = [len(prompt_ids), params.max_tokens, 0]
        self.waiting.append(number)
        self.most_running = max(self.most_running, len(self.running))
        return number

    def step(self):
        decoding = [n for n in self.running if n not in self.waiting]
        first = [self.waiting.popleft()] if self.waiting else []
        self.clock.sleep(self.decode_s * bool(decoding) + self.prefill_s * len(first))
        return [self._advance(n, 1 if n in first else self.burst) for n in (*decoding, *first)]

    def _advance(self, number, count):
        prompt, asked, made = self.running[number]
        count = min(count, asked - made)
        self.running[number][2] += count
        completion = None
        if made + count == asked:
            del self.running[number]
            timing = RequestTiming(request_id=number, prompt_tokens=prompt, arrived_s=-1.0, token_s=(), cached_tokens=3)
            completion = Completion(
                prompt_token_ids=(0,) * prompt,
                token_ids=(0,) * asked,
                text="",
                finish_reason=self.reason,
                logprobs=None,
                timing=timing,
                num_preemptions=0,
            )
        return StepOutput(request_id=number, token_ids=(0,) * count, text="", completion=completion)
