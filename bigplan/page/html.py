"""A page as HTML that loads nothing: styles, scripts, data and the plotting library are inline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bigplan.errors import RefusedError
from bigplan.page.parts import Grid, Page
from bigplan.version import __version__

VEGA_LITE = "6.4"  # a version that vl-convert ships
_FOLDER = Path(__file__).with_name("template")


def page_html(page: Page) -> str:
    """The page as one HTML document. Raises RefusedError where the plotting library is missing."""
    charts = {chart.name: chart.spec for section in page.sections for chart in section.charts}
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            page=page,
            version=__version__,
            charts=_data(charts),
            style=Markup(_text("page.css")),
            script=Markup(_text("page.js")),
            library=Markup(library()),
        )
    )


def grids_html(headline: str, *grids: Grid, lines: Sequence[str] = ()) -> str:
    """Tables under a sentence, for a notebook."""
    template = _templates().get_template("tables.html.j2")
    return template.render(headline=headline, lines=lines, grids=grids)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    loader = FileSystemLoader(_FOLDER)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    made.filters["coded"] = _coded
    return made


def _coded(text: str) -> Markup:
    """Text whose commands, between backticks, are marked as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # one of them is no quote
        return escape(text)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if i % 2 else p for i, p in enumerate(parts))


def require_library() -> None:
    """Raise RefusedError where the plotting library is not installed."""
    if find_spec("vl_convert") is None:
        raise RefusedError(
            "pages and pictures need the plotting library Vega, which is not installed; run: "
            "pip install 'bigplan[report]'"
        )


@lru_cache(maxsize=1)
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, taken from vl-convert's wheel."""
    require_library()
    from vl_convert import javascript_bundle

    script = str(javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE))
    assert "</script" not in script.lower(), "it would end the element that it stands in"
    return script


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _data(value: object) -> Markup:
    """JSON for a script element: without "<" nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
