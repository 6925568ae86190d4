"""A page written to files."""

from __future__ import annotations

from pathlib import Path

from bigplan.errors import InputError
from bigplan.page import picture
from bigplan.page.html import page_html, require_library
from bigplan.page.parts import Page
from bigplan.spec.files.document import write_bytes, write_text


def require_file(*paths: str | Path | None) -> None:
    """Raise InputError where no file is named, RefusedError without the plotting library."""
    if all(path is None for path in paths):
        raise InputError("a report is written to files, and none is named; add html, svg or png")
    require_library()


def write_page(
    page: Page,
    html: str | Path | None = None,
    svg: str | Path | None = None,
    png: str | Path | None = None,
) -> None:
    """Write the page as HTML and its picture as SVG or PNG, whichever paths are given.

    Raises RefusedError without the plotting library, InputError where a file cannot be written, or
    none is named.
    """
    require_file(html, svg, png)
    if html is not None:
        write_text(Path(html).expanduser(), page_html(page), "page")
    if svg is not None:
        write_text(Path(svg).expanduser(), picture.svg(page.picture()), "picture")
    if png is not None:
        write_bytes(Path(png).expanduser(), picture.png(page.picture()), "picture")
