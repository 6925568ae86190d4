"""A page written to files."""

from __future__ import annotations

from pathlib import Path

from bigplan.errors import InputError
from bigplan.page import picture
from bigplan.page.html import page_html, require_library
from bigplan.page.parts import Page
from bigplan.spec.files.document import write_bytes, write_text
from bigplan.targets import PAGE, PNG, SVG, require_target


def require_file(
    html: str | Path | None = None, svg: str | Path | None = None, png: str | Path | None = None
) -> None:
    """Raise InputError where no file is named, or one would replace a file of another kind.

    RefusedError without the plotting library.
    """
    named = {"html": (html, PAGE), "svg": (svg, SVG), "png": (png, PNG)}
    if all(path is None for path, _ in named.values()):
        raise InputError("a report is written to files, and none is named; add html, svg or png")
    for name, (path, kind) in named.items():
        if path is not None:
            require_target(name, Path(path).expanduser(), kind)
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
