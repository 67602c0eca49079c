"""Files of tuned choices: what is found in them, and what is said when they cannot be used."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from quantkit.errors import InputError, OutputError
from quantkit.kernels.gpu import choices, configs, tuned
from quantkit.kernels.gpu.choices import Cublas, Decode, Prefill, Tile
from quantkit.kernels.gpu.packing import PackedWeight, Packing
from quantkit.kernels.layouts import kv_scheme, layer_layout

GPU = "NVIDIA Test 9000"
CUDA = torch.device("cuda", 0)
KIND = Packing(bits=4, group=128, span=64).name
NARROW = Tile(block_m=8, block_n=32, warps=2, stages=1, programs=4)
TILE = Tile(block_m=16, block_n=128, warps=8, stages=3, programs=1)


def entry(rows=1, outputs=4096, inputs=4096, choice=NARROW, kind=KIND):
    return tuned.TunedChoice(
        kernel="product",
        kind=kind,
        sizes={"rows": rows, "outputs": outputs, "inputs": inputs},
        choice=choice,
        microseconds=1.0,
        default_microseconds=1.5,
        ratio=1.0,
    )


def table(*entries, device=GPU):
    return tuned.TunedTable(device=device, capability=90, versions={"quantkit": "0"}, entries=entries)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is only a name, and folders of files for it."""
    monkeypatch.setenv("QUANTKIT_TUNE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(configs, "capability", lambda device: 90)
    configs.forget()
    yield tmp_path
    configs.forget()


def weight(outputs=4096, inputs=4096, bits=4):
    packing = Packing(bits=bits, span=64, group=128)
    return PackedWeight(words=torch.empty(0), scale=torch.empty(0), zero=None, shape=(outputs, inputs), packing=packing)


def views(kind="int8"):
    layout = layer_layout(num_heads=8, head_dim=128, page_size=64, dtype=torch.bfloat16, scheme=kv_scheme(kind))
    return layout.views(torch.empty(2, layout.page_bytes, dtype=torch.uint8), None)


def test_a_file_comes_back_as_it_was_written(tmp_path):
    decode = Decode(tile=64, warps=4, stages=3, programs=2, least_tiles=2, most_splits=32)
    attention = [
        tuned.TunedChoice(
            kernel=name, kind="k", sizes=sizes, choice=choice, microseconds=2.0, default_microseconds=2.0, ratio=1.0
        )
        for name, sizes, choice in (
            ("decode", {"heads": 8}, decode),
            ("prefill", {}, Prefill(rows=64, tile=32, warps=4, stages=1)),
        )
    ]
    written = table(*attention, entry(), entry(rows=4, choice=TILE), entry(rows=64, choice=Cublas()))
    path = tmp_path / "deep" / "file.json"
    tuned.write(path, written)
    assert [item.name for item in path.parent.iterdir()] == ["file.json"]
    assert sorted(tuned.read(path, GPU).entries, key=str) == sorted(written.entries, key=str)
    assert tuned.read(path) == tuned.read(path, GPU)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(OutputError, match=r"taken\.json: cannot be written"):
        tuned.write(tmp_path / "taken.json", table())
    assert [item.name for item in tmp_path.iterdir()] == ["taken.json"]


def test_the_nearest_size_that_is_near_enough_counts():
    small, large = entry(outputs=4096, choice=NARROW), entry(outputs=16384, choice=TILE)
    pair = table(small, large)

    def find(rows, outputs, inputs, kind=KIND):
        return pair.find("product", kind, {"rows": rows, "outputs": outputs, "inputs": inputs})

    assert find(1, 4096, 4096) == NARROW
    assert find(1, 6000, 4096) == NARROW
    assert find(1, 12000, 5000) == TILE
    assert find(1, 8192, 4096) == NARROW  # as near to both: the smaller one
    assert find(1, 16384, 8193) is None
    assert find(1, 2000, 4096) is None
    assert find(4, 4096, 4096) is None
    assert find(1, 4096, 4096, "8 bits") is None
    assert pair.find("decode", KIND, {"heads": 8}) is None


def test_the_users_file_goes_before_the_shipped_one_and_both_before_the_default(gpu):
    default = choices.default_product(1, 90)
    assert configs.product(weight(), 1, CUDA) == default
    tuned.write(tuned.shipped_file(GPU), table(entry(), entry(rows=4, choice=TILE)))
    assert configs.product(weight(), 1, CUDA) == default  # files are read once
    configs.forget()
    assert configs.product(weight(), 1, CUDA) == NARROW
    assert configs.product(weight(), 3, CUDA) == TILE
    tuned.write(tuned.user_file(GPU), table(entry(choice=TILE)))
    configs.forget()
    assert configs.product(weight(), 1, CUDA) == TILE
    assert configs.product(weight(), 4, CUDA) == TILE
    assert configs.product(weight(), 5, CUDA) == choices.default_tile(5, 90)
    assert configs.product(weight(), 999, CUDA) == Cublas()
    assert configs.product(weight(bits=8), 1, CUDA) == choices.default_product(1, 90)


def test_pages_ask_the_same_files(gpu):
    kind = configs.pages_name(kv_scheme("int8"), 128, 64, 4)
    decode = Decode(tile=32, warps=2, stages=3, programs=4, least_tiles=2, most_splits=32)
    prefill = Prefill(rows=32, tile=32, warps=4, stages=1)
    entries = [
        tuned.TunedChoice(
            kernel=name, kind=kind, sizes=sizes, choice=choice, microseconds=1.0, default_microseconds=1.0, ratio=1.0
        )
        for name, sizes, choice in (("decode", {"heads": 64}, decode), ("prefill", {}, prefill))
    ]
    tuned.write(tuned.user_file(GPU), table(*entries))
    assert configs.decode(views(), 8, 32, CUDA) == decode
    assert configs.decode(views(), 32, 32, CUDA) == decode  # four times as many heads
    assert configs.decode(views(), 33, 32, CUDA) == choices.default_decode(128, 64, 90)
    assert configs.decode(views(), 8, 8, CUDA) == choices.default_decode(128, 64, 90)
    assert configs.decode(views("auto"), 8, 32, CUDA) == choices.default_decode(128, 64, 90)
    assert configs.prefill(views(), 32, CUDA) == prefill
    assert configs.prefill(views("int4"), 32, CUDA) == choices.default_prefill(128, 64, True, True, 90)


def test_other_devices_take_the_defaults(gpu):
    tuned.write(tuned.user_file(GPU), table(entry()))
    for name in ("cpu", "meta"):
        assert configs.product(weight(), 1, torch.device(name)) == choices.default_product(1, 90)


def test_what_is_forced_goes_before_everything(gpu):
    tuned.write(tuned.user_file(GPU), table(entry()))
    with configs.forced(TILE, Prefill(rows=16, tile=16, warps=1, stages=1)):
        assert configs.product(weight(), 1, CUDA) == TILE
        with configs.forced(Cublas()):
            assert configs.product(weight(), 1, CUDA) == Cublas()
        assert configs.prefill(views(), 32, CUDA).rows == 16
        assert configs.decode(views(), 8, 32, CUDA) == choices.default_decode(128, 64, 90)
    assert configs.product(weight(), 1, CUDA) == NARROW


def test_a_choice_is_looked_up_once(gpu, monkeypatch):
    tuned.write(tuned.user_file(GPU), table(entry()))
    first = configs.product(weight(), 1, CUDA)
    monkeypatch.setattr(tuned.TunedTable, "find", None)
    assert configs.product(weight(), 1, CUDA) is first


BROKEN = [
    ("{", "is not valid JSON"),
    ("[]", "holds a JSON list, not an object"),
    ('{"schema": 0}', "has schema 0, this quantkit reads 3"),
    ('{"schema": 3}', "has no 'device'"),
    ({"device": {"name": "other", "capability": 90}}, "was measured on 'other', this is 'NVIDIA Test 9000'"),
    ({"choice": {"method": "decode"}}, "kernel 'product' has no method 'decode'"),
    ({"choice": {"method": "tile", "block_n": 16}}, "tile takes"),
    ({"block_n": 24}, "block_n is 24, must be a power of two from 1 to 1024"),
    ({"warps": True}, "warps is True"),
    ({"stages": 0}, "stages is 0, must be a whole number from 1 to 8"),
    ({"sizes": {"rows": 0}}, "sizes are {'rows': 0}"),
    ({"sizes": {"colour": 1}}, "sizes are {'colour': 1}"),
]


@pytest.mark.parametrize(("change", "expected"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_file_that_cannot_be_used_is_named_once_and_left_out(gpu, caplog, change, expected):
    path = tuned.user_file(GPU)
    tuned.write(path, table(entry()))
    if isinstance(change, str):
        path.write_text(change)
    else:
        data = json.loads(path.read_text())
        for name, value in change.items():
            where = data if name in data else data["entries"][0]
            (where if name in where else where["choice"])[name] = value
        path.write_text(json.dumps(data))
    with pytest.raises(InputError) as raised:
        tuned.read(path, GPU)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    with caplog.at_level(logging.WARNING):
        assert configs.product(weight(), 1, CUDA) == choices.default_product(1, 90)
        assert configs.product(weight(), 4, CUDA) == choices.default_product(4, 90)
    assert [record.message for record in caplog.records] == [f"{raised.value}; the defaults are used in its place"]


def test_names_and_folders(monkeypatch, tmp_path):
    assert tuned.slug("NVIDIA GeForce RTX 4090 (24GB)") == "nvidia-geforce-rtx-4090-24gb"
    monkeypatch.delenv("QUANTKIT_TUNE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.user_file("A B") == tmp_path / "quantkit" / "tune" / "a-b.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuned.user_folder() == tmp_path / "home" / ".cache" / "quantkit" / "tune"
    assert [configs.row_bucket(count) for count in (1, 2, 4, 5, 17, 64, 256, 257)] == [1, 4, 4, 16, 32, 64, 256, None]


def test_every_shipped_file_can_be_read():
    for path in tuned._SHIPPED.glob("*.json"):
        assert tuned.slug(tuned.read(path).device) == path.stem


def test_defaults_are_what_a_file_may_say():
    made = [choices.default_product(count, chip) for count in (1, 5, 64, 65) for chip in (80, 90)]
    made += [choices.default_decode(dim, size, 90) for dim in (64, 256) for size in (16, 64)]
    made += [choices.default_prefill(dim, 64, True, halved, 90) for dim in (64, 256) for halved in (True, False)]
    for choice in made:
        for name, value in tuned.to_json(choice).items():
            assert name == "method" or tuned._check(name, value) is None
