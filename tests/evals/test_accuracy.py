"""The accuracy table: the score's protocol, its intervals, and the page that the committed figures give."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "evals" / folder) for folder in ("accuracy", "peers", "")]

import bench  # noqa: E402
import job  # noqa: E402
import page  # noqa: E402
import peers  # noqa: E402
import processes  # noqa: E402
import provenance  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import score  # noqa: E402
import store  # noqa: E402

from quantkit.compress.recipe.load import build  # noqa: E402

DEMO = REPOSITORY / "quantkit" / "demo" / "model"
TEXT = (REPOSITORY / "evals" / "tasks" / "demo" / "demo_text.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def original():
    return score.load(DEMO)


def test_windows_are_the_protocols(original):
    ids = original.tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    windows = score.read_windows(original, TEXT, window=64, max_windows=7)
    assert len(windows) == 7
    assert all(len(window) == 64 and window[0] == original.tokenizer.bos_token_id for window in windows)
    assert [token for window in windows for token in window[1:]] == ids[: 7 * 63]


def test_windows_make_equal_blocks(original):
    assert len(score.read_windows(original, TEXT, window=32, max_windows=250)) == 200


def test_the_original_is_at_no_distance_from_itself_and_its_perplexity_is_transformers(original):
    transformers = pytest.importorskip("transformers")
    windows = score.read_windows(original, TEXT, window=64, max_windows=4)
    (found,) = score.score([original], original, windows)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = torch.tensor(windows)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    assert found.perplexity == pytest.approx(math.exp(float(nll)), rel=1e-4)
    assert found.tokens == 4 * 63
    assert found.kl == (0.0,) * 4
    assert found.top1 == 1.0


def test_kept_predictions_give_the_same_score(original):
    windows = score.read_windows(original, TEXT, window=64, max_windows=4)
    kept = list(score.log_probabilities(original, windows))
    assert score.score([original], original, windows, kept) == score.score([original], original, windows)


def test_kl_is_from_the_original_to_the_model(original, monkeypatch):
    windows = ((0, 1, 2),) * 2
    before = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    after = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    monkeypatch.setattr(score, "log_probabilities", lambda llm, windows: iter([after, after]))
    (found,) = score.score([original], original, windows, [before, before])
    assert found.mean_kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert found.perplexity == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.25)) / 2))
    assert found.top1 == 0


def test_intervals_are_students():
    found = score.interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.high - found.mean == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(("shift", "sign"), [(0.5, 1), (-0.5, -1), (0.0, 0)])
def test_paired_differences_see_what_the_blocks_share(shift, sign):
    noise = [0.1, -0.1, 0.05, -0.05]
    other = [1.0, 5.0, 9.0, 2.0]
    value = [x + shift + e for x, e in zip(other, noise, strict=True)]
    assert score.difference(value, other).sign == sign


def make_row(**changes) -> store.Row:
    about = {"tool": "quantkit", "method": "gptq", "numbers": "w4g32", "symmetric": True, "how": "[gptq]"}
    found = {"windows": 4, "tokens": 1020, "nll": (1.0, 1.1, 0.9, 1.0), "kl": (0.1, 0.2, 0.1, 0.2), "top1": 0.9}
    return store.Row(**{**about, **found, **changes})


def test_rows_survive_a_file(tmp_path):
    rows_ = {"b": make_row(tasks={"t": store.pack([True, False, True])}), "a": make_row(cpu_s=1.5, peak_mb=3)}
    store.save_rows(tmp_path / "deep" / "x.json", rows_)
    assert store.load_rows(tmp_path / "deep" / "x.json") == rows_
    assert list(json.loads((tmp_path / "deep" / "x.json").read_text())) == ["a", "b"]


def test_rows_of_several_writers_are_all_kept(tmp_path, monkeypatch):
    path, plainly = tmp_path / "x.json", store.load_rows

    def slowly(file):
        known = plainly(file)
        barrier.acquire(timeout=0.02)  # time for the others to read as well, if nothing holds them back
        return known

    barrier = threading.Semaphore(0)
    monkeypatch.setattr(store, "load_rows", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.add_row(path, name, make_row()), "abcd"))
    assert list(plainly(path)) == ["a", "b", "c", "d"]


def test_answers_are_kept_item_by_item():
    right = [True, False, False, True, False]
    assert store.pack(right).scores == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert store.pack([False, False]).scores == [0.0, 0.0]


@pytest.mark.parametrize("model", rows.MODELS, ids=lambda model: model.name)
def test_every_declared_row_is_a_recipe(model):
    declared = list(rows.wanted(model))
    assert len({row.key for row in declared}) == len(declared)
    for row in declared:
        made = build(rows.recipe(row, "ids.jsonl"), row.key)
        numbers = rows.NUMBERS[row.numbers]
        assert made.scheme.default.weight.group_size == numbers.group
        assert not numbers.is_integer or made.scheme.default.weight.symmetric == row.symmetric
        assert len(made.steps) == len(rows.METHODS[row.method])


def test_calibration_is_drawn_as_for_the_peers(original, tmp_path):
    found = bench.Bench(model=rows.MODELS[0], path=DEMO, data=None, original=original, windows=(), reference=[])
    bench.write_calibration(found, tmp_path / "ids.jsonl")
    samples = [json.loads(line)["input_ids"] for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    text = (DEMO.parent / "calibration.txt").read_text(encoding="utf-8")
    ids = original.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = random.Random(0).randrange(0, len(ids) - 255)
    assert len(samples) == 128
    assert {len(sample) for sample in samples} == {256}
    assert samples[0] == [original.tokenizer.bos_token_id, *ids[first : first + 255]]


@pytest.fixture
def bed(monkeypatch, tmp_path):
    """A bed where quantizing and measuring cost nothing and leave a trace."""
    done = []

    def run_row(opened, row, work, *, tasks):
        done.append(row.key)
        taken = provenance.stamp(rows.recipe(row, "calibration.jsonl"))
        about = {"numbers": row.numbers, "method": row.method, "symmetric": row.symmetric}
        return make_row(**about, cpu_s=9.0, others=0.5, peak_mb=1, taken=taken)

    monkeypatch.setattr(run, "run_row", run_row)
    monkeypatch.setattr(run, "open_bench", lambda model, *folders: None)
    monkeypatch.setattr(run, "write_calibration", lambda opened, path: None)
    monkeypatch.setattr(run, "original_row", lambda opened, *, tasks: make_row(tool="original"))
    args = {"results": tmp_path, "work": tmp_path / "work", "models": None, "data": None, "tasks": ""}
    return argparse.Namespace(**args, only=["demo w4g32 *"], redo=False, keep=False), done


def test_a_killed_run_goes_on_with_what_is_missing(bed):
    args, done = bed
    run.run_model(rows.MODELS[0], args)
    everything = [row.key for row in rows.wanted(rows.MODELS[0]) if row.numbers == "w4g32"]
    assert done == everything
    path = args.results / "demo.json"
    kept = store.load_rows(path)
    del kept[everything[1]]
    store.save_rows(path, kept)
    done.clear()
    run.run_model(rows.MODELS[0], args)
    assert done == [everything[1]]


def test_a_row_whose_seconds_are_not_known_is_measured_again(bed):
    args, done = bed
    run.run_model(rows.MODELS[0], args)
    path = args.results / "demo.json"
    kept = store.load_rows(path)
    store.add_row(path, done[2], dataclasses.replace(kept[done[2]], cpu_s=None))
    again = done.pop(2)
    done.clear()
    run.run_model(rows.MODELS[0], args)
    assert done == [again]


def test_other_code_is_measured_again_unless_told_to_keep(bed, monkeypatch):
    args, done = bed
    run.run_model(rows.MODELS[0], args)
    count = len(done)
    monkeypatch.setattr(provenance, "code_digests", lambda recipe: {"numerics.affine": "another"})
    args.keep = True
    run.run_model(rows.MODELS[0], args)
    assert len(done) == count
    args.keep = False
    run.run_model(rows.MODELS[0], args)
    assert len(done) == 2 * count


@pytest.mark.parametrize("model", rows.MODELS, ids=lambda model: model.name)
def test_every_row_of_a_peer_has_a_name_and_a_job(model):
    declared = list(rows.peer_rows(model))
    assert len({peer.key(numbers, form, "1") for peer, numbers, form in declared}) == len(declared)
    for peer, numbers, form in declared:
        made = rows.peer_job(peer, numbers, form)
        assert peer.tool in peers.TOOLS
        assert peers.TOOLS[peer.tool][1].is_file()
        assert job.Job(model="m", output="o", ids="i", **made).group == (rows.NUMBERS[numbers].group or -1)


def test_a_stale_row_is_marked_and_said(tmp_path):
    wanted = rows.Wanted(numbers="w4g32", method="gptq", symmetric=True)
    fresh = make_row(taken=provenance.stamp(rows.recipe(wanted, "elsewhere/calibration.jsonl")))
    store.save_rows(tmp_path / "demo.json", {page.ORIGINAL: make_row(kl=(0.0,) * 4), wanted.key: fresh})
    store.save_rows(tmp_path / "peers-demo.json", {"b": make_row(tool="T 1", kl=(0.3,) * 4)})
    marked = f"| gptq {provenance.MARK} |"
    assert marked not in page.render(tmp_path)
    assert "By KL, quantkit is ahead in 1," in page.readme_sentence(tmp_path)
    code = {**fresh.taken.code, "compress.algorithms.gptq": "another"}
    stale = dataclasses.replace(fresh, taken=dataclasses.replace(fresh.taken, code=code))
    store.save_rows(tmp_path / "demo.json", {page.ORIGINAL: make_row(kl=(0.0,) * 4), wanted.key: stale})
    assert marked in page.render(tmp_path)
    assert f"change of `compress.algorithms.gptq` (1 row at commit {fresh.taken.commit})." in page.render(tmp_path)
    assert page.readme_sentence(tmp_path) == ""
    assert provenance.MARK in page.standing(tmp_path)


@pytest.mark.parametrize(("others_s", "shown"), [(0.0, "| 10 |"), (9.0, "| ~10 |")])
def test_seconds_of_a_busy_machine_are_marked(others_s, shown, tmp_path, monkeypatch):
    def run_measured(command, log, *, environment):
        assert environment["OMP_NUM_THREADS"] == "1"
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint" / "quantkit-run.json").write_text('{"peak_bytes": 3145728}')
        return processes.Usage(code=0, wall_s=9, cpu_s=10, peak_mb=1, others_cpu_s=others_s, said="")

    monkeypatch.setattr(run, "run_measured", run_measured)
    monkeypatch.setattr(run, "measure", lambda opened, checkpoint, *, tasks, **about: make_row(**about))
    opened = bench.Bench(model=rows.MODELS[0], path=DEMO, data=None, original=None, windows=(), reference=[])
    row = run.run_row(opened, rows.Wanted(numbers="w4g32", method="gptq", symmetric=True), tmp_path, tasks=False)
    assert (row.cpu_s, row.peak_mb, row.others) == (10, 3, others_s and pytest.approx(1 / os.cpu_count(), abs=1e-3))
    store.save_rows(tmp_path / "demo.json", {page.ORIGINAL: make_row(kl=(0.0,) * 4), "a": row})
    assert shown in page.render(tmp_path)


def test_the_page_says_which_of_two_is_better(tmp_path):
    better, worse = make_row(kl=(0.01, 0.02, 0.01, 0.02)), make_row(kl=(0.3, 0.3, 0.3, 0.3), tool="T 1")
    store.save_rows(tmp_path / "demo.json", {page.ORIGINAL: make_row(kl=(0.0,) * 4), "a": better})
    store.save_rows(tmp_path / "peers-demo.json", {"b": worse})
    text = page.render(tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("| 4 bits in groups of 32, symmetric")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[5] == "=", "the same nll"
    assert cells[8] == "+", "less KL"
