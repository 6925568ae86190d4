"""Colours that can be told from the page, light and dark: WCAG 2.1, 1.4.11 asks 3:1 of graphics."""

import re
from pathlib import Path

import pytest

from bigplan import page
from bigplan.page.charts.looks import PALETTE

CSS = (Path(page.__file__).parent / "template" / "page.css").read_text()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def of_page(name: str) -> list[str]:
    """Light, then dark."""
    return re.findall(rf"--{name}: (#[0-9a-f]{{6}})", CSS)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out(scheme: int) -> None:
    background = of_page("page")[scheme]
    for colour in PALETTE:
        assert contrast(colour, background) >= 3.0, colour
    for text in ("ink", "dim", "link"):
        assert contrast(of_page(text)[scheme], background) >= 4.5, text
