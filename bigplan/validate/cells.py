"""What published tables write in a column, in the words that the rules know.

Each function takes a cell's text and returns it in those words, or as it is.
"""

from __future__ import annotations

import re

YES, NO = ("true", "yes", "y", "on"), ("false", "no", "n", "off")
NOTHING = ("none", "n/a", "-", "0", *NO)
MAKERS = re.compile(
    r"(\d+\s*x\s*)?((NVIDIA|AMD|Tesla|GeForce|Quadro|Instinct)[\s-]+)*", re.IGNORECASE
)
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
STAGE = re.compile(r"(?:zero|stage)\D*([0-3])", re.IGNORECASE)
# Words that a precision begins with, lower case.
PRECISIONS = (
    (r"(nf4\+)?(bf16|bfloat16)", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32|float32", "fp32"),
    (r"(mx)?fp8|float8", "fp8"),
    (r"(mx|nv)?fp4", "fp4"),
)


def gpu(text: str) -> str:
    """A GPU's name without its maker's and a number in front: `8x NVIDIA H100` is an `H100`."""
    found = MAKERS.match(text)
    return text[found.end() :] if found else text


def flag(text: str) -> str:
    """1 or 0 for yes or no."""
    return "1" if text.lower() in YES else "0" if text.lower() in NO else text


def count(text: str) -> str:
    """A number without commas between its thousands."""
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def stage(text: str) -> str:
    """A stage of ZeRO: `ZeRO-3` is 3."""
    found = STAGE.search(text)
    return found[1] if found else text


def kind(text: str) -> str | None:
    """What a model or training has, None for nothing: `no` says as much as a blank."""
    return None if text.lower() in (*NOTHING, "dense") else text


def place(text: str) -> str:
    """Where state is kept off the GPU: `none`, or the place; the CPU where it is not told."""
    low = text.lower()
    return "none" if low in NOTHING else "cpu" if low in (*YES, "1") else text


def recompute(text: str) -> str:
    """`full`, `selective` or `none`; other words as they are."""
    low = text.lower()
    if low in (*YES, "1"):
        return "full"
    if low in NOTHING:
        return "none"
    return next((word for word in ("full", "selective") if low.startswith(word)), text)


def precision(text: str) -> str:
    """A precision's short name: `bfloat16` is `bf16`, `mxfp8` is `fp8`."""
    found = (short for words, short in PRECISIONS if re.match(words, text.lower()))
    return next(found, text)
