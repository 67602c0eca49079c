"""Bundled calibration pictures: drawn by formulas, so that nothing but a few lines comes with the package.

They show a language model what its own vision tower says of plain things; for a model that is to be used on photographs
or documents, calibrate on some of these.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
    """Captions and pictures, (height, width, 3) uint8; the same ones every time."""
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
    """One colour where a shape is, another one elsewhere; shapes are formulas of y and x between 0 and 1."""
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
