"""Pictures: an SVG with its words as text, a PNG of the same."""

import struct
from xml.etree import ElementTree

import pytest

from bigplan.page import picture
from bigplan.page.charts.looks import PICTURE_WIDTH
from tests.page.pages import KINDS, page

pytest.importorskip("vl_convert")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_picture(kind: str) -> None:
    root = ElementTree.fromstring(picture.svg(page(kind).picture()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert PICTURE_WIDTH <= width < 1.5 * PICTURE_WIDTH
    assert 200 < height < 3000
    words = {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    wanted = {
        "plan": {"gpu compute", "GPU memory, MiB", "host memory, GiB", "activations"},
        "run": {"gpu compute", "GPU memory, MiB"},
        "cluster": {"GPU memory", "bf16: 989 TFLOP/s"},
        "experiment": {"seconds of 1 M tokens"},
    }
    assert wanted[kind] <= words


def test_a_png_has_two_pixels_for_one() -> None:
    data = picture.png(page("cluster").picture())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, _ = struct.unpack(">II", data[16:24])
    assert width >= picture.SCALE * PICTURE_WIDTH
