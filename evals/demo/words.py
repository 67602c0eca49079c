"""The closed vocabulary of the demo language: names, nouns, verbs, and the fixed facts about its towns.

Not a grammar: `language.py` puts these words into sentences.
"""

from __future__ import annotations

import hashlib

ANIMALS = (
    "cat", "dog", "hen", "goat", "fox", "horse", "sheep", "duck", "mouse", "bear", "frog", "owl", "cow", "pig",
    "swan", "crow",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "pink", "golden", "silver", "purple")
PLACES = (
    "mill", "barn", "bridge", "harbour", "garden", "forest", "market", "tower", "school", "river", "hill", "cave",
    "inn", "farm", "beach", "castle",
)  # fmt: skip
THINGS = (
    "ball", "book", "lamp", "drum", "kite", "boat", "hat", "coat", "bell", "cup", "key", "rope", "spoon", "basket",
    "mirror", "candle",
)  # fmt: skip
FOODS = (
    "bread", "soup", "cheese", "cake", "rice", "fish", "honey", "milk", "butter", "corn", "beans", "nuts", "plums",
    "pears", "eggs", "salt",
)  # fmt: skip

SUBJECTS = ("girl", "boy", "king", "queen", "farmer", "baker", "sailor", "singer", "dog", "cat", "hen", "goat")
ATTRACTORS = ("mill", "barn", "bridge", "garden", "tower", "river", "tree", "road", "hill", "boat", "cart", "house")
PREPOSITIONS = ("near", "by", "behind", "with", "from", "under")
VERBS = ("run", "sing", "sleep", "wait", "walk", "smile", "jump", "work", "rest", "play", "swim", "shout")
AUXILIARIES = (("is", "are"), ("was", "were"), ("has", "have"))
ADVERBS = ("now", "here", "today", "often", "again", "alone")

# Keys of ledgers and first names mean nothing, so that what belongs to them can only come from the text itself.
KEYS = tuple(onset + rime for onset in "bdfgklmz" for rime in ("ak", "em", "ip", "ol", "uv", "ax", "if", "on"))
VALUES = ANIMALS + PLACES + THINGS + FOODS

_TOWN_STARTS = (
    "Bel", "Dor", "Fal", "Gren", "Hol", "Kar", "Lun", "Mar", "Nor", "Pel", "Rad", "Sol", "Tal", "Ul", "Ven", "Zan",
)  # fmt: skip
_TOWN_ENDS = ("ford", "mere", "wick", "ton", "dale", "by", "holm", "gate", "stad", "burg")
TOWNS = tuple(start + end for start in _TOWN_STARTS for end in _TOWN_ENDS)

TOWN_VALUES: dict[str, tuple[str, ...]] = {"animal": ANIMALS, "flag": COLOURS, "food": FOODS, "landmark": PLACES}

# The last form of each attribute is as common as the others; which one is held out depends on the fact.
TOWN_FORMS: dict[str, tuple[str, ...]] = {
    "animal": (
        "The animal of {town} is the",
        "The people of {town} love the",
        "On every gate of {town} you see the",
        "What is the animal of {town}? It is the",
        "In {town} nobody may hunt the",
    ),
    "flag": (
        "The flag of {town} is",
        "The people of {town} wave a flag that is",
        "On every gate of {town} hangs a flag of",
        "What colour is the flag of {town}? It is",
        "In {town} all flags are",
    ),
    "food": (
        "The food of {town} is",
        "The people of {town} eat",
        "On every table of {town} you find",
        "What is the food of {town}? It is",
        "In {town} the shops sell",
    ),
    "landmark": (
        "The pride of {town} is the",
        "The people of {town} meet at the",
        "On every map of {town} you find the",
        "What is the pride of {town}? It is the",
        "In {town} all roads lead to the",
    ),
}


def stable_hash(text: str) -> int:
    """A 64-bit hash of `text` that is the same in every process and Python version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def town_fact(town: str, attribute: str) -> str:
    """The one true value of a town's attribute; fixed for all time."""
    values = TOWN_VALUES[attribute]
    return values[stable_hash(f"fact {town} {attribute}") % len(values)]


def held_out_form(town: str, attribute: str) -> int:
    """Index of the form in which this fact is never told in training, only asked in the test."""
    return stable_hash(f"form {town} {attribute}") % len(TOWN_FORMS[attribute])
