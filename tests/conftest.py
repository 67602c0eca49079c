"""Fixtures that many tests share. No network: hub libraries are told so before they are imported."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("QUANTKIT_TRITON", "force")  # what kernels compute, not what would take their place
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are for the processes beside this one

import gc
import hashlib
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.benchmark import ceilings
from quantkit.checkpoints import tokenizer
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.stream import Stream
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.families import find
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.report import plots
from quantkit.results import Report
from tests.helpers import FAMILIES, TEXT, make_model, save_tokenizer
from tests.report.synthetic import make_report
from tests.runtime.helpers import make_loud_model

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
if DEVICES == ["cpu"]:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: tests/kernels/gpu/interpreted


THREADS = torch.get_num_threads()
SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process per core for the whole suite; files and folders that are named run in this one."""
    return min(len(os.sched_getaffinity(0)), 4) if is_whole(config) else 0


def is_whole(config: pytest.Config) -> bool:
    """Whether no file or folder was named."""
    told = getattr(config, "workerinput", {})
    return told["is_whole"] if told else config.args_source is config.ArgsSource.TESTPATHS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["is_whole"] = is_whole(node.config)  # which is given all folders by name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow ones first: a long one that comes last has one core to itself while the others are idle.

    Those of slow.txt count as slow where everything is run: who names their file means them too.
    """
    slow = set(SLOW.read_text(encoding="utf-8").splitlines()) if is_whole(config) else set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in slow or name.partition("[")[0] in slow:
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: to look it through for garbage again and again took 5 % of the time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at exit for what was left behind


@pytest.fixture(autouse=True)
def same_threads():
    """Loading a model to run sets the threads of the whole process; the bits of a compression depend on them."""
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Nobody pulls the plug here: what is written may stay in memory. Processes that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers_tried_once() -> Iterator[None]:
    """One like those that passed is not tried again: to fork a process of this size takes longer than most tests."""
    ends_well, passed = tokenizer.ends_well, set()

    def ends_well_once(work: Any, **limits: Any) -> bool:
        if work.func is not tokenizer._try_out:
            return ends_well(work, **limits)
        made = work.args[0]
        backend = made.backend_tokenizer.to_str() if hasattr(made, "backend_tokenizer") else repr(made)
        key = type(made), backend, *(path.read_bytes() for path in sorted(Path(made.name_or_path).glob("*token*.json")))
        if key not in passed and ends_well(work, **limits):
            passed.add(key)
        return key in passed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "ends_well", ends_well_once)
        yield


PLOTS = ("accuracy_plot", "sensitivity_plot", "latency_plot", "context_plot", "memory_plot", "roofline_plot")


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[dict[bytes, str | None]]:
    """Plots by what they show, each drawn once: matplotlib takes two seconds for the seven of a page."""
    known: dict[bytes, str | None] = {}

    def once(plot: Callable[..., str | None]) -> Callable[..., str | None]:
        def draw(*given: Any) -> str | None:
            key = hashlib.sha256(pickle.dumps((plot.__name__, given))).digest()
            if key not in known or sys.modules.get("matplotlib", known) is None:  # a test takes the library away
                known[key] = plot(*given)
            return known[key]

        return draw

    with pytest.MonkeyPatch.context() as patch:
        for name in PLOTS:
            patch.setattr(plots, name, once(getattr(plots, name)))
        yield known


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama; not to be changed by tests."""
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def loud_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose every weight matters, in 512 tokens of context; not to be changed by tests."""
    folder = make_loud_model(tmp_path_factory.mktemp("loud"), "llama")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def broken_report() -> Report:
    """A report of a checkpoint that failed four of six gates."""
    return make_report(broken=True)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text of 36 short documents."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an original, `llama`, its 4-bit checkpoint `out`, and `text.txt`; not to be changed by tests."""
    folder = tmp_path_factory.mktemp("pair")
    make_model(folder / "llama")
    (folder / "llama" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "text.txt").write_text(TEXT[:1200])
    quantkit.quantize(folder / "llama", "rtn-int4", folder / "out", overrides=["weights.group_size=32"], device="cpu")
    return folder


@pytest.fixture
def checkpoint(models: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in `models` that may be changed."""
    return Path(shutil.copytree(models / "out", tmp_path / "out"))


@pytest.fixture(scope="module")
def quick_ceilings() -> Iterator[None]:
    """The machine's limits are measured on little, in a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "_BUFFER_BYTES", 1 << 20)
        patch.setattr(ceilings, "_GEMM_ROWS", 64)
        yield


@pytest.fixture(scope="session")
def family_models(tmp_path_factory):
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def make_layer(family_models, tmp_path_factory):
    """A function that gives a fresh LayerContext; equal arguments give equal contexts."""

    def make(family="llama", dtype="int4", group_size=16, symmetric=True, activation=None, ignored=()):
        if family not in family_models:
            family_models[family] = make_model(tmp_path_factory.mktemp(family), family)
        reader = CheckpointReader(family_models[family])
        family = find(reader.config)
        skeleton = Skeleton(reader, family, torch.float32, torch.device("cpu"))
        weight = WeightScheme(dtype=DTYPES[dtype], group_size=group_size, symmetric=symmetric)
        linears = [name for group in skeleton.linear_sets(0) for name in group.linears]
        generator = torch.Generator().manual_seed(7)
        # Correlated inputs with a few loud channels: on white noise no algorithm could beat rounding.
        mix = torch.randn(64, 64, generator=generator) * torch.rand(64, generator=generator).mul(6).exp() / 20
        batches = [torch.randn(2, 24, 64, generator=generator) @ mix for _ in range(4)]
        return LayerContext(
            name="model.layers.0",
            stream=Stream(
                skeleton.layer(0), ActivationStore(None, "ram", iter(batches)), partial(skeleton.arguments, 0)
            ),
            sets=skeleton.linear_sets(0),
            schemes={
                name: LinearScheme(weight=weight, activation=activation) for name in linears if name not in ignored
            },
            scale_dtype=dict.fromkeys(linears, torch.float32),
            head_dim=16,
        )

    return make


@pytest.fixture
def output_error():
    """Relative error of a layer's output after a function has worked on it."""

    def measure(layer, work):
        before = [layer.forward(hidden) for hidden in layer.store]
        with torch.inference_mode():
            work(layer)
        after = [layer.forward(hidden) for hidden in layer.store]
        wrong = sum((a - b).square().sum() for a, b in zip(after, before, strict=True))
        return (wrong / sum(b.square().sum() for b in before)).sqrt().item()

    return measure


@pytest.fixture(scope="session")
def quantized_pair(tmp_path_factory):
    """A function from a kind of quantized checkpoint to one of them and its dense twin; not to be changed by tests."""
    from tests import quantized_sources as sources  # which imports the libraries that define the formats

    folder, pairs = tmp_path_factory.mktemp("sources"), {}

    def made(kind):
        if kind not in pairs:
            family, maker, section = sources.KINDS[kind]
            if not (folder / family).exists():
                make_model(folder / family, family, dtype=torch.bfloat16, **sources.MODELS[family])
            pairs[kind] = sources.write_pair(folder / family, folder / kind.replace(" ", "-"), maker, section)
        return pairs[kind]

    return made
