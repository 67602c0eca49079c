"""Samples with images out of folders, files and what is bundled; how a model's processor is asked for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from quantkit.compress.calibration import dataset, images
from quantkit.compress.calibration.images import draw_pictures
from quantkit.errors import DataError

IMAGE, CONFIG = 9, {"image_token_id": 9}


class Processor:
    """Letters become their numbers, each image one token and its mean colour."""

    image_processor, image_token = object(), "<image>"

    def __init__(self, template=None):
        self.chat_template = template

    def apply_chat_template(self, messages, tokenize):
        marks = {"image": lambda _: "<image>", "text": lambda part: part["text"]}
        parts = [f"{m['role']}:" + "".join(marks[p["type"]](p) for p in m["content"]) for m in messages]
        return "".join(parts)

    def __call__(self, text, images, return_tensors, add_special_tokens=True):
        ids = [256] if add_special_tokens else []
        for number, part in enumerate(text[0].split("<image>")):
            ids += ([IMAGE] if number else []) + list(part.encode())
        colours = [torch.tensor(list(image.resize((1, 1)).tobytes())).float() for image in images[0]]
        pixels = {"pixel_values": torch.stack(colours)} if colours else {}
        return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)), **pixels}


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    chosen = Processor()
    monkeypatch.setattr(images, "load_processor", lambda _: chosen)
    return chosen


@pytest.fixture
def folder(tmp_path):
    for number, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        Image.new("RGB", (4, 4), colour).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("none")
    return tmp_path


def load(data, samples=8, length=128, seed=0):
    return images.load_images(str(data), Path(), CONFIG, samples=samples, sequence_length=length, seed=seed)


def text(ids):
    return bytes(token for token in ids if token not in (IMAGE, 256)).decode()


def colours(read):
    return [inputs["pixel_values"].tolist() for _, inputs in read.inputs()]


def test_a_folder_is_its_images(folder):
    read = load(folder)
    assert sorted(colours(read)) == [[[0.0, 0.0, 255.0]], [[0.0, 255.0, 0.0]], [[255.0, 0.0, 0.0]]]
    assert [ids.tolist()[0] for ids, _ in read.inputs()] == list(map(list, read.token_ids))
    assert load(folder).digest == read.digest
    assert len(load(folder, samples=2).chats) == 2
    Image.new("RGB", (4, 4), (9, 9, 9)).save(folder / "1.png")
    assert load(folder).digest != read.digest


LINES = [
    ({"image": "0.png", "text": "Red?"}, "Red?", 1),
    ({"images": ["0.png", "1.png"]}, "What does the picture show?", 2),
    ({"image": "2.png", "messages": [{"role": "user", "content": "<image>Blue?"}]}, "user:Blue?", 1),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "path": "1.png"}]},
                {"role": "assistant", "content": "b"},
            ]
        },
        "user:aassistant:b",
        1,
    ),
]


@pytest.mark.parametrize(("record", "expected", "number"), LINES)
def test_a_line_is_a_sample(folder, processor, record, expected, number):
    processor.chat_template = "there is one" if "messages" in record else None
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    read = load(folder / "data.jsonl")
    ids = read.token_ids[0]
    assert text(ids).strip() == expected
    assert ids.count(IMAGE) == number == len(colours(read)[0])
    assert (ids[0] == 256) == (processor.chat_template is None)  # a template begins texts itself


WRONG = [
    ({"text": "nothing to see"}, "the record names no image; give 'image' or 'images'"),
    ({"image": "7.png"}, r"image .*7\.png does not exist"),
    ({"image": "notes.txt"}, r"image .*notes\.txt cannot be read"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "each image with a path"),
    (
        {"images": ["0.png", "1.png"], "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "'messages' has places for 1 image, but 'images' lists 2",
    ),
    ({"messages": "hello"}, "is not a chat of texts and images"),
]


@pytest.mark.parametrize(("record", "message"), WRONG)
def test_what_is_no_sample_is_said_with_its_line(folder, record, message):
    (folder / "data.jsonl").write_text("\n" + json.dumps(record))
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        load(folder / "data.jsonl")


def test_what_is_too_long_is_left_out_since_images_cannot_be_cut(folder):
    lines = [{"image": "0.png", "text": "a" * length} for length in (10, 200)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = load(folder / "data.jsonl", length=64)
    assert len(read.chats) == 1
    left_out = "1 sample with images left out: they have up to 203 tokens, more than the sequence_length of 64"
    assert read.warnings == (left_out,)
    with pytest.raises(DataError, match=r"all samples are too long: .* 203 tokens.*raise calibration\.seq"):
        load(folder / "data.jsonl", length=8)


def test_an_image_that_the_text_has_no_place_for_is_refused(folder, processor):
    processor.image_token = ""
    with pytest.raises(DataError, match="the sample's text contains no token for the image"):
        load(folder)


def test_no_such_images(tmp_path):
    with pytest.raises(DataError, match="the folder has no image files"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"do not exist; give a folder, a \.jsonl file or bundled"):
        load(tmp_path / "none")


def test_bundled_pictures_are_eight_and_always_the_same():
    pictures = draw_pictures()
    assert len({caption for caption, _ in pictures}) == 8
    assert all(pixels.dtype == torch.uint8 and pixels.shape[2] == 3 for _, pixels in pictures)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(pictures, draw_pictures(), strict=True))
    assert all(pixels.min() < pixels.max() for _, pixels in pictures)


def test_images_in_a_chat_of_texts_are_refused(tmp_path):
    """A tokenizer's template would put a mark in the place of the image, which the model never sees."""
    content = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Red?"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    with pytest.raises(DataError, match=r"a chat contains images; give this data as calibration\.images"):
        dataset.load_samples(tmp_path / "chat.jsonl", Processor(), samples=1, sequence_length=8, vocab_size=300, seed=0)
