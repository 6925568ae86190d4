"""Pages in headless Chromium: drawn at two widths, light and dark, zoomed, asking for nothing.

Skipped where there is no Chromium, which `.ci/run` installs from the distribution's packages.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.pages import KINDS, html

pytest.importorskip("vl_convert")
playwright = pytest.importorskip("playwright.sync_api")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ALL_DRAWN = "[...document.querySelectorAll('.chart')].every(c => c.dataset.drawn)"
DRAWN_AS = "[...document.querySelectorAll('.chart')].map(c => c.dataset.drawn)"
WINDOW = """bigplanViews.get(document.querySelector('[data-chart=timeline]'))
  .view.scale('x').domain()"""
# Pixels of each canvas that differ from its first one.
INKED = """[...document.querySelectorAll('.chart canvas')].map(canvas => {
  const pixels = new Uint32Array(
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return pixels.reduce((n, pixel) => n + (pixel !== pixels[0]), 0) / pixels.length;
})"""
# Vega leaves out what its picture has no room for: a narrow window scrolls charts instead.
CHARTS = "Math.min(...[...document.querySelectorAll('.chart')].map(each => each.clientWidth))"
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
SECONDS = 60_000  # milliseconds that a chart may take on a machine that is busy


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a window, with what it asked for and complained of."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.requests, self.complaints = page, list[str](), list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.goto(path.as_uri())
        page.wait_for_function(ALL_DRAWN, timeout=SECONDS)
        self.uri = path.as_uri()

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The page, width and scheme of the test's parameter."""
    kind, width, scheme = request.param
    path = tmp_path / f"{kind}.html"
    path.write_text(html(kind))
    context = chromium.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
    )
    yield Opened(context.new_page(), path)
    context.close()


def drawn_and_fits(opened: Opened, scheme: str) -> None:
    assert set(opened.evaluate(DRAWN_AS)) == {scheme}
    assert all(share > 0.01 for share in opened.evaluate(INKED))
    assert not opened.evaluate(OVERFLOWS)
    assert opened.evaluate(CHARTS) >= 500
    assert opened.complaints == []
    assert opened.requests == [opened.uri]


NARROW = [(kind, 390, "dark") for kind in KINDS]


@pytest.mark.parametrize("opened", NARROW, indirect=True, ids=lambda case: case[0])
def test_a_narrow_dark_page_is_drawn_and_fits(opened: Opened) -> None:
    """Wide and light ones are below."""
    drawn_and_fits(opened, "dark")


@pytest.mark.parametrize("opened", [("plan", 1280, "light")], indirect=True)
def test_the_timeline_zooms(opened: Opened) -> None:
    drawn_and_fits(opened, "light")
    page = opened.page
    whole = opened.evaluate(WINDOW)

    def other_than(before: list[float]) -> list[float]:
        """What is shown once the chart has moved."""
        moved = f"before => String({WINDOW}) !== String(before)"
        page.wait_for_function(moved, arg=before, timeout=SECONDS)
        return [float(end) for end in opened.evaluate(WINDOW)]

    def pressed(what: str) -> list[float]:
        before = opened.evaluate(WINDOW)
        page.click(f"#timeline [data-zoom={what}]")
        return other_than(before)

    start, end = pressed("in")
    assert (start, end) == pytest.approx((0.25 * whole[1], 0.75 * whole[1]))
    assert pressed("right")[0] > start
    assert pressed("all") == whole
    page.hover("#timeline canvas")
    page.mouse.wheel(0, 200)  # scrolls, as everywhere
    page.wait_for_timeout(200)
    assert opened.evaluate(WINDOW) == whole
    page.hover("#timeline canvas")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    start, end = other_than(whole)
    assert 0 < end - start < whole[1]
    assert opened.complaints == []


@pytest.mark.parametrize("opened", [("run", 1280, "light")], indirect=True)
def test_a_scheme_that_changes_is_followed(opened: Opened) -> None:
    drawn_and_fits(opened, "light")
    opened.page.emulate_media(color_scheme="dark")
    dark = f"{DRAWN_AS}.every(drawn => drawn === 'dark')"
    opened.page.wait_for_function(dark, timeout=SECONDS)
    assert opened.complaints == []


@pytest.mark.parametrize("opened", [("cluster", 390, "light")], indirect=True)
def test_the_policy_of_the_page_stops_requests(opened: Opened) -> None:
    """Were a script to ask for something, the browser would refuse before it leaves."""
    asked = """() => fetch('https://example.com/').then(() => 'left', error => error.name)"""
    assert opened.page.evaluate(asked) == "TypeError"
    assert any("Content Security Policy" in text for text in opened.complaints)
