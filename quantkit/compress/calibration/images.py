"""Calibration samples with images, as the model's own processor converts them.

Images are the bundled pictures, the files of a folder, or the files that a .jsonl file names. They are opened one at a
time, and again for each use, because the pixels of a sample take as much memory as the sample's hidden states.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from quantkit.checkpoints.tokenizer import load_tokenizer, quiet_stdout, render_chat
from quantkit.distribution import install_command
from quantkit.errors import DataError, InputError, ModelError, first_line
from quantkit.quantities import counted
from quantkit.safety.untrusted import MAX_TEXT_BYTES, parse_object, read_text

# Colours of the drawings: red, green and blue of 0 to 255.
_COLOURS = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "red": (208, 32, 38),
    "blue": (28, 76, 180),
    "yellow": (250, 216, 40),
    "green": (34, 140, 60),
    "purple": (112, 48, 160),
    "orange": (240, 130, 20),
}

QUESTION = "What does the picture show?"


def draw_pictures() -> list[tuple[str, Tensor]]:
    """Draw the bundled pictures, which are always the same. Return the caption and pixels (height, width, 3) uint8 of
    each picture.
    """
    return [
        ("A red circle on a white ground.", _two("red", "white", _circle, 224, 224)),
        ("A blue square on a yellow ground.", _two("blue", "yellow", _square, 224, 224)),
        ("Black and white stripes that run from top to bottom.", _two("black", "white", _stripes, 168, 280)),
        ("A green and white chessboard.", _two("green", "white", _chessboard, 224, 224)),
        ("Purple rings on a white ground, one inside the other.", _two("purple", "white", _rings, 280, 168)),
        ("A chart of four orange bars, each one higher than the one before.", _two("orange", "white", _bars, 168, 224)),
        ("A grey slope that grows brighter from left to right.", _slope(168, 224)),
        ("Noise in many colours, without any shape in it.", _noise(168, 168)),
    ]


def _two(front: str, ground: str, shape: Callable[[Tensor, Tensor], Tensor], height: int, width: int) -> Tensor:
    """Draw a shape in one colour on a background of another colour. `shape` returns, for coordinates y and x from 0 to
    1, whether each point lies inside the shape.
    """
    y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    colours = torch.tensor([_COLOURS[ground], _COLOURS[front]], dtype=torch.uint8)
    return colours[shape(y, x).long()]


def _circle(y: Tensor, x: Tensor) -> Tensor:
    return (y - 0.5).square() + (x - 0.5).square() < 0.1


def _square(y: Tensor, x: Tensor) -> Tensor:
    return ((y - 0.5).abs() < 0.3) & ((x - 0.5).abs() < 0.3)


def _stripes(y: Tensor, x: Tensor) -> Tensor:
    return (x * 10).long() % 2 == 0


def _chessboard(y: Tensor, x: Tensor) -> Tensor:
    return ((x * 8).long() + (y * 8).long()) % 2 == 0


def _rings(y: Tensor, x: Tensor) -> Tensor:
    return (((y - 0.5).square() + (x - 0.5).square()).sqrt() * 16).long() % 2 == 0


def _bars(y: Tensor, x: Tensor) -> Tensor:
    return (1 - y < ((x * 4).long() + 1) * 0.2) & (x * 4 % 1 < 0.7)


def _slope(height: int, width: int) -> Tensor:
    row = (torch.arange(width) * 255 // width).to(torch.uint8)
    return row[None, :, None].expand(height, width, 3).contiguous()


def _noise(height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)


_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Outputs of processors that are not images.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids")
_LIBRARIES = re.compile(r"requires the (\w+) library|No module named '(\w+)'")

Picture = Path | Tensor
"""A file, or pixels (height, width, 3) uint8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageChat:
    """One sample with images.

    Args:
        where: origin of the sample, for error messages.
        messages: a chat; each content is a list of `{"type": "image"}` and `{"type": "text", "text": ...}`.
        pictures: the image of each image part, in the order of the parts.
    """

    where: str
    messages: Sequence[Mapping[str, Any]]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSamples:
    """Samples with images, ready to run.

    Args:
        processor: the model's processor.
        chats: one chat per sample.
        token_ids: token ids of each chat, including those that stand for images.
        warnings: problems found in the data, one sentence each.
        digest: SHA-256 of everything that the processor returns for the samples.
    """

    processor: Any
    chats: tuple[ImageChat, ...]
    token_ids: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...]
    digest: str

    def inputs(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield, for each sample, its token ids (1, T) and the arguments of the model's forward."""
        for chat in self.chats:
            inputs = _process(self.processor, chat)
            yield inputs["input_ids"], inputs


def load_images(
    data: str, folder: Path, config: Mapping[str, Any], *, samples: int, sequence_length: int, seed: int
) -> ImageSamples:
    """Read, process and draw calibration samples with images; the same arguments give the same samples.

    Args:
        data: "bundled", a folder of image files, or a .jsonl file with `image`, `images` or `messages` per line; paths
            in the file are relative to its folder.
        folder: folder of the model.
        config: config.json of the model.
        samples: maximum number of samples.
        sequence_length: maximum number of tokens per sample; longer samples are skipped, because an image cannot be
            cut.
        seed: seed of the random choice.
    Raises:
        DataError: the data do not exist, an image cannot be read, or no sample fits.
        ModelError: the model has no image processor.
    """
    processor = load_processor(folder)
    chats = _bundled() if data == "bundled" else _read(Path(data))
    random.Random(seed).shuffle(chats)
    kept: list[tuple[ImageChat, tuple[int, ...]]] = []
    digest, longest, long = hashlib.sha256(), 0, 0
    for chat in chats:
        if len(kept) == samples:
            break
        inputs = _process(processor, chat)
        ids = tuple(inputs["input_ids"][0].tolist())
        _check_image_tokens(ids, config, chat)
        if len(ids) > sequence_length:
            long, longest = long + 1, max(longest, len(ids))
            continue
        kept.append((chat, ids))
        for leaf in tree_flatten(inputs)[0]:
            digest.update(_bytes(leaf))
    too_long = f"they have up to {longest} tokens, more than the sequence_length of {sequence_length}"
    if not kept:
        raise DataError(
            f"calibration images {data}: all samples are too long: {too_long}; raise calibration.sequence_length, or "
            "give smaller images"
        )
    warnings = (f"{counted(long, 'sample')} with images left out: {too_long}",) if long else ()
    return ImageSamples(
        processor=processor,
        chats=tuple(chat for chat, _ in kept),
        token_ids=tuple(ids for _, ids in kept),
        warnings=warnings,
        digest=digest.hexdigest(),
    )


def load_processor(folder: Path) -> Any:
    """Load the processor that converts texts with images to a model's inputs; code in the model's folder is never run.

    Raises:
        InputError: a library that the processor needs is not installed.
        ModelError: the model has no image processor, or the processor or tokenizer cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InputError(f"calibration with images needs Pillow; run {install_command('images')}") from None
    load_tokenizer(folder)  # checks the tokenizer, which is part of the processor
    try:
        with quiet_stdout():
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many classes for missing and broken files
        if library := _LIBRARIES.search(str(error)):
            name = (library[1] or library[2]).lower()
            raise InputError(f"{folder}: the model's image processor needs {name}; run pip install {name}") from error
        why = f"its image processor cannot be loaded: {first_line(error)}; see its preprocessor_config.json"
        raise ModelError(f"{folder}: {why}") from error
    if getattr(processor, "image_processor", None) is None:
        raise ModelError(f"{folder}: the model has no image processor; leave calibration.images out")
    return processor


def _process(processor: Any, chat: ImageChat) -> dict[str, Any]:
    """Return the arguments of the model's forward for a sample, as tensors of one sequence."""
    template = getattr(processor, "chat_template", None)
    try:
        text = _text(processor, chat, template)
        options = {"add_special_tokens": False} if template else {}  # the template adds them
        made = processor(text=[text], images=[_open(chat)], return_tensors="pt", **options)
    except DataError:
        raise
    except Exception as error:  # whatever templates and processors raise
        raise DataError(
            f"{chat.where}: the model's processor cannot convert this sample: {first_line(error)}"
        ) from error
    inputs = dict(made)
    if not set(inputs) - set(_OF_TEXT):
        raise DataError(f"{chat.where}: the model's processor returned nothing for the images of this sample")
    return inputs


def _text(processor: Any, chat: ImageChat, template: Any) -> str:
    if template:
        return render_chat(processor, chat.messages)
    mark = str(getattr(processor, "boi_token", None) or getattr(processor, "image_token", ""))
    parts = [part for message in chat.messages for part in message["content"]]
    return "\n".join(mark if part["type"] == "image" else part["text"] for part in parts)


def _open(chat: ImageChat) -> list[Any]:
    """Open the images of a sample with Pillow."""
    from PIL import Image

    opened = []
    for picture in chat.pictures:
        if isinstance(picture, Tensor):
            opened.append(Image.fromarray(picture.numpy()))
            continue
        try:
            with Image.open(picture) as file:
                opened.append(file.convert("RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{chat.where}: image {picture} cannot be read: {first_line(error)}") from error
    return opened


def _check_image_tokens(ids: tuple[int, ...], config: Mapping[str, Any], chat: ImageChat) -> None:
    """Raise DataError if no token of a sample stands for its images, because the model would not see the images."""
    token = config.get("image_token_id", config.get("image_token_index"))
    if token is not None and token not in ids:
        raise DataError(f"{chat.where}: the sample's text contains no token for the image ({token} in config.json)")


def _bundled() -> list[ImageChat]:
    return [_chat(f"bundled picture {caption!r}", (pixels,), QUESTION, caption) for caption, pixels in draw_pictures()]


def _read(path: Path) -> list[ImageChat]:
    """Return the samples of a folder or a .jsonl file."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
        if not files:
            raise DataError(f"calibration images {path}: the folder has no image files ({', '.join(_SUFFIXES)})")
        return [_chat(str(file), (file,), QUESTION) for file in files]
    if not path.exists():
        raise DataError(f"calibration images {path} do not exist; give a folder, a .jsonl file or bundled")
    text = read_text(path, DataError, MAX_TEXT_BYTES)
    chats = [_parse(record, where, path.parent) for where, record in read_records(text, path)]
    if not chats:
        raise DataError(f"calibration images {path}: the file is empty")
    return chats


def read_records(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each line of a .jsonl file's text, its file and line number (for error messages) and its object.

    Raises:
        DataError: a line is not a JSON object.
    """
    # Not splitlines, which also splits at U+2028, a character that JSON texts may contain unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse_object(line, where, DataError, "one JSON object per line is needed")


def _parse(record: Mapping[str, Any], where: str, folder: Path) -> ImageChat:
    """Convert a record to a chat. The record names its images in `image` or `images`, or inside `messages`."""
    files = record.get("images", record.get("image"))
    files = [files] if isinstance(files, str) else (files or [])
    messages = record.get("messages")
    if not messages:
        return _chat(where, _paths(files, where, folder), str(record.get("text") or QUESTION))
    try:
        chat = [{**message, "content": _parts(message["content"])} for message in messages]
        inside = [part for message in chat for part in message["content"] if part["type"] == "image"]
        files = files or [part[min({"image", "path", "url"} & part.keys(), default="path")] for part in inside]
    except (TypeError, KeyError, AttributeError):
        raise DataError(f"{where}: 'messages' is not a chat of texts and images, each image with a path") from None
    if not inside:
        chat[0]["content"] = [*[{"type": "image"} for _ in files], *chat[0]["content"]]
    elif len(inside) != len(files):
        raise DataError(
            f"{where}: 'messages' has places for {counted(len(inside), 'image')}, but 'images' lists {len(files)}"
        )
    plain = [{**message, "content": [_bare(part) for part in message["content"]]} for message in chat]
    return ImageChat(where=where, messages=plain, pictures=_paths(files, where, folder))


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content.replace("<image>", "")}] if isinstance(content, str) else list(content)


def _bare(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else dict(part)


def _chat(where: str, pictures: tuple[Picture, ...], question: str, answer: str = "") -> ImageChat:
    asked = [*[{"type": "image"} for _ in pictures], {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    if answer:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return ImageChat(where=where, messages=messages, pictures=pictures)


def _paths(files: Sequence[Any], where: str, folder: Path) -> tuple[Path, ...]:
    if not files or not all(isinstance(file, str) for file in files):
        raise DataError(
            f"{where}: the record names no image; give 'image' or 'images' with paths. "
            "Texts without images belong in calibration.data"
        )
    paths = tuple(folder / file.removeprefix("file://") for file in files)
    for path in paths:
        if not path.is_file():
            raise DataError(f"{where}: image {path} does not exist")
    return paths


def _bytes(leaf: Any) -> bytes:
    """Return the bytes of one value of a processor's output, for a digest."""
    if isinstance(leaf, Tensor):
        return str((leaf.shape, leaf.dtype)).encode() + leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return repr(leaf).encode()
