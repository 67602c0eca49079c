"""The search for choices with a kernel whose times are written down: what wins, what is dropped, what is kept."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from quantkit.benchmark import tune as tuning
from quantkit.benchmark.tune import LEAST_GAIN, Case, OutOfTime, search_choices, tune
from quantkit.errors import InputError
from quantkit.kernels.gpu import choices, spaces, tuned
from quantkit.kernels.gpu.packing import Packing

DEFAULT = choices.default_product(1, 90)
CANDIDATES = tuple(
    choice for choice in spaces.products(1, Packing(bits=4, span=64, group=128), 90) if choice != DEFAULT
)
VERSIONS = {"quantkit": "1", "torch": "2", "triton": "3"}


def case(outputs=4096, candidates=CANDIDATES):
    return Case(
        kernel="product",
        kind="4 bits",
        sizes={"rows": 1, "outputs": outputs, "inputs": 4096},
        label=f"{outputs} outputs",
        default=DEFAULT,
        candidates=candidates,
    )


class Kernel:
    """A problem that takes `times(choice, sample)` microseconds, 10 unless said otherwise."""

    def __init__(self, microseconds=None, wrong=None, drift=lambda turn: 1.0):
        self.microseconds, self.wrong, self.drift = microseconds or {}, wrong or {}, drift
        self.checked, self.samples = [], Counter()

    def check(self, choice):
        self.checked.append(choice)
        return self.wrong.get(choice, "")

    def times(self, among, samples):
        self.samples.update(dict.fromkeys(among, samples))
        return [[self.microseconds.get(choice, 10.0) * self.drift(turn) for turn in range(samples)] for choice in among]


def test_the_fastest_wins_and_the_slow_ones_cost_little():
    best, slow = CANDIDATES[-1], CANDIDATES[0]
    kernel = Kernel({best: 5.0, slow: 40.0, **dict.fromkeys(CANDIDATES[1:-1], 9.0)})
    outcome = search_choices(case(), kernel)
    assert outcome.entry.choice == best
    assert (outcome.entry.microseconds, outcome.entry.default_microseconds, outcome.entry.ratio) == (5.0, 10.0, 2.0)
    assert kernel.samples[slow] == tuning._FIRST_SAMPLES
    assert kernel.samples[best] > 10 * kernel.samples[slow]
    assert outcome.num_tried == len(kernel.checked) - 1 == len(set(kernel.checked)) - 1  # each once, the default apart
    everything = len(kernel.checked) * kernel.samples[best]
    assert sum(kernel.samples.values()) < everything / 3


def test_neighbours_of_the_best_are_measured_too():
    first = CANDIDATES[3]
    neighbour = replace(first, stages=4)
    assert neighbour in spaces.refined(first)
    assert neighbour not in CANDIDATES
    outcome = search_choices(case(), Kernel({first: 8.0, neighbour: 6.0}))
    assert outcome.entry.choice == neighbour


@pytest.mark.parametrize(("gain", "wins"), [(1.015, False), (LEAST_GAIN, False), (1.03, True)])
def test_the_default_stays_unless_it_is_clearly_beaten(gain, wins):
    outcome = search_choices(case(), Kernel({CANDIDATES[2]: 10.0 / gain})).entry
    assert (outcome.choice == CANDIDATES[2]) == wins
    assert outcome.ratio == (pytest.approx(gain) if wins else 1.0)
    assert outcome.default_microseconds == 10.0
    assert wins or (outcome.choice, outcome.microseconds) == (DEFAULT, 10.0)


def test_the_proof_is_by_pairs():
    """The machine slows down tenfold while it measures: neighbours in time still say by how much one is faster."""
    outcome = search_choices(case(), Kernel({CANDIDATES[2]: 9.5}, drift=lambda turn: 1 + 0.3 * turn)).entry
    assert outcome.choice == CANDIDATES[2]
    assert outcome.ratio == pytest.approx(10 / 9.5)


def test_what_is_wrong_is_dropped_and_counted_however_fast():
    fast, wrong, broken = CANDIDATES[:3]
    kernel = Kernel({fast: 8.0, wrong: 1.0, broken: 1.0}, {wrong: "computes something else", broken: "spills"})
    outcome = search_choices(case(), kernel)
    assert outcome.entry.choice == fast
    assert outcome.dropped == {"computes something else": 1, "spills": 1}
    assert wrong not in kernel.samples
    assert broken not in kernel.samples


def test_a_default_that_fails_is_said_and_nothing_is_chosen():
    outcome = search_choices(case(), Kernel(wrong={DEFAULT: "computes something else"}))
    assert outcome.entry is None
    assert outcome.problem == "the default: computes something else"


def test_without_usable_candidates_the_default_is_measured():
    outcome = search_choices(case(candidates=CANDIDATES[:2]), Kernel(wrong=dict.fromkeys(CANDIDATES[:2], "spills")))
    assert outcome.entry.choice == DEFAULT
    assert outcome.entry.ratio == 1.0


@pytest.mark.parametrize("steps", [0, 1, 5, 20])
def test_a_case_that_is_not_decided_in_time_is_none(steps):
    left = itertools.count(steps, -1)
    with pytest.raises(OutOfTime):
        search_choices(case(), Kernel(), lambda: next(left) <= 0)


def test_spaces_hold_what_files_may_say_and_nothing_twice():
    for rows, bits, span, chip in itertools.product((1, 4, 16, 32, 64), (2, 4, 8), (32, 16, 8), (80, 86, 90)):
        first = spaces.products(rows, Packing(bits=bits, span=span, group=128), chip)
        assert len(first) == len(set(first))
        default = choices.default_product(rows, chip)
        assert isinstance(default, choices.Cublas) or any(type(choice) is type(default) for choice in first)
        for choice in [*first, *(other for one in first for other in spaces.refined(one))]:
            check(choice)
    for size in (16, 64):
        default = choices.default_prefill(128, size, False, False, 90)
        decodes = spaces.decodes(page_size=size, head_dim=128, halved=True)
        for choice in [*decodes, *spaces.prefills(page_size=size, default=default)]:
            assert choice.tile <= size
            for other in [choice, *spaces.refined(choice)]:
                check(other)
    assert not spaces.refined(choices.Cublas())
    assert choices.Cublas() not in spaces.products(64, Packing(bits=8, span=64, group=0, unpacked=True), 90)


def check(choice):
    for name, value in tuned.to_json(choice).items():
        assert name == "method" or tuned._check(name, value) is None


# ---- runs


class Clock:
    """Seconds that pass with every case that is opened."""

    def __init__(self, each=10.0):
        self.now, self.each, self.opened = 0.0, each, []

    def __call__(self):
        return self.now

    def opener(self, **kernels):
        @contextlib.contextmanager
        def open_problem(item):
            self.opened.append(item.label)
            yield kernels.get(f"n{item.sizes['outputs']}", Kernel({CANDIDATES[1]: 5.0}))
            self.now += self.each

        return open_problem


CASES = [case(outputs) for outputs in (1000, 2000, 4000)]


@pytest.fixture
def run(tmp_path):
    def go(clock, cases=CASES, *, seconds=1000.0, again=False, versions=VERSIONS, report=None, **kernels):
        options = {} if report is None else {"report": report}
        return tune(
            cases,
            clock.opener(**kernels),
            tuned.TunedTable(device="GPU", capability=90, versions=versions, entries=(), path=tmp_path / "gpu.json"),
            seconds=seconds,
            again=again,
            clock=clock,
            **options,
        )

    return go


def outputs(finished):
    return sorted(entry.sizes["outputs"] for entry in finished.table.entries)


def test_what_is_found_is_what_the_file_says(run):
    reported = []
    finished = run(Clock(), report=lambda outcome, number, total: reported.append((outcome.case.label, number, total)))
    assert tuned.read(finished.table.path, "GPU") == finished.table
    assert finished.table.find("product", "4 bits", CASES[0].sizes) == CANDIDATES[1]
    assert (len(finished.outcomes), finished.num_kept, finished.num_left, finished.seconds) == (3, 0, 0, 30.0)
    assert reported == [(item.label, number, 3) for number, item in enumerate(CASES, 1)]


def test_time_ends_a_run_and_the_next_one_goes_on(run):
    first = run(Clock(), seconds=15.0)
    assert (len(first.outcomes), first.num_kept, first.num_left) == (2, 0, 1)
    clock = Clock()
    second = run(clock)
    assert clock.opened == ["4000 outputs"]
    assert (len(second.outcomes), second.num_kept, second.num_left) == (1, 2, 0)
    assert outputs(second) == [1000, 2000, 4000]


def test_an_interrupted_run_keeps_what_was_finished(run, tmp_path):
    class Stopped(Kernel):
        def check(self, choice):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Clock(), n2000=Stopped())
    assert [item.name for item in tmp_path.iterdir()] == ["gpu.json"]
    clock = Clock()
    assert outputs(run(clock)) == [1000, 2000, 4000]
    assert clock.opened == ["2000 outputs", "4000 outputs"]


def test_again_measures_everything_and_keeps_what_it_was_not_asked_about(run):
    run(Clock())
    clock = Clock()
    finished = run(clock, CASES[:1], again=True, n1000=Kernel({CANDIDATES[0]: 2.0}))
    assert clock.opened == ["1000 outputs"]
    assert outputs(finished) == [1000, 2000, 4000]
    assert finished.table.find("product", "4 bits", CASES[0].sizes) == CANDIDATES[0]


def test_a_file_of_other_versions_is_not_added_to(run):
    run(Clock())
    other = {**VERSIONS, "triton": "4"}
    with pytest.raises(InputError, match=r"gpu\.json: was measured with .*triton 3, this is .*triton 4; .*--again"):
        run(Clock(), versions=other)
    finished = run(Clock(), CASES[:1], versions=other, again=True)
    assert outputs(finished) == [1000]
    assert tuned.read(finished.table.path).versions == other


def test_a_broken_file_is_only_replaced_when_asked_for(run, tmp_path):
    (tmp_path / "gpu.json").write_text("{}")
    with pytest.raises(InputError, match="has schema None"):
        run(Clock())
    assert (tmp_path / "gpu.json").read_text() == "{}"
    assert outputs(run(Clock(), again=True)) == [1000, 2000, 4000]


def test_failures_are_told_and_the_rest_goes_on(run):
    class Large(Kernel):
        def check(self, choice):
            raise torch.OutOfMemoryError

    finished = run(Clock(), n1000=Large(), n2000=Kernel(wrong={DEFAULT: "spills"}))
    assert [outcome.problem for outcome in finished.outcomes] == [
        "does not fit the device's memory",
        "the default: spills",
        "",
    ]
    assert outputs(finished) == [4000]
