"""Pages by an HTML parser: whole, safe, and with what they are asked to show."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from bigplan.page import html as module
from bigplan.page.charts.looks import chart
from bigplan.page.html import grids_html, page_html
from bigplan.page.parts import Chart, Grid, Page, PageSection
from tests.page.pages import KINDS, html, page

vl_convert = pytest.importorskip("vl_convert")
VOID = {"meta", "link", "img", "br", "hr", "input"}
FETCHING = {"src", "srcset", "data", "poster", "action", "formaction", "ping", "background"}


class Parsed(HTMLParser):
    """Elements with attributes, texts by element, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def charts_of(parsed: Parsed) -> dict[str, Any]:
    (data,) = (text for text in parsed.texts["script"] if text.startswith("{"))
    return dict(json.loads(data))


def test_a_page_is_well_formed_and_asks_for_nothing(kind: str) -> None:
    parsed = Parsed(html(kind))
    assert parsed.open == []
    assert not [a for _, attributes in parsed.elements for a in attributes if a in FETCHING]
    assert not list(parsed.named("link"))
    links = [attributes["href"] for attributes in parsed.named("a")]
    assert links == [f"#s{n}" for n in range(1, len(page(kind).sections) + 1)]
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    (policy,) = (a["content"] or "" for a in parsed.named("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_every_chart_has_its_place_its_words_and_compiles(kind: str) -> None:
    parsed = Parsed(html(kind))
    specs = charts_of(parsed)
    places = [a for a in parsed.named("div") if "data-chart" in a]
    assert [place["data-chart"] for place in places] == list(specs)
    assert all(place["aria-label"] for place in places)
    for spec in specs.values():
        made = vl_convert.vegalite_to_vega(spec, vl_version=module.VEGA_LITE)
        assert made["marks"]
        assert "url" not in json.dumps(spec["data"])


def test_a_plan_has_every_section() -> None:
    titles = [section.title for section in page("plan").sections]
    assert titles == [
        "In short",
        "The step",
        "Memory",
        "Operators",
        "Advice",
        "Runners-up",
        "What would help",
        "How sure this is",
    ]
    assert list(charts_of(Parsed(html("plan")))) == [
        "timeline",
        "resources",
        "memory-gpu",
        "memory-host",
        "memory-nvme",
        "roofline",
        "rivals",
        "help",
        "validation",
    ]


def test_a_run_has_the_measured_step_over_the_predicted_one() -> None:
    timeline = charts_of(Parsed(html("run")))["timeline"]
    runs = {value["run"] for value in timeline["data"]["values"]}
    assert runs == {"predicted", "measured"}
    assert timeline["layer"][0]["encoding"]["yOffset"]["sort"] == ["measured", "predicted"]
    assert any(value.get("critical") for value in timeline["data"]["values"])


def test_text_is_text() -> None:
    """Whatever a name or note holds: it ends no element and begins none."""
    rude = '</script><script>alert("1")</script><!-- \u2028 & <b>'
    spec = chart([{"x": rude}], mark="point", encoding={"x": {"field": "x"}})
    made = Page(
        rude,
        rude,
        (
            PageSection(
                rude, (rude,), (Chart("a", rude, rude, spec),), (Grid(rude, (rude,), ((rude,),)),)
            ),
        ),
        lambda: spec,
    )
    parsed = Parsed(page_html(made))
    assert parsed.open == []
    assert len(list(parsed.named("script"))) == 3
    assert not list(parsed.named("b"))
    assert charts_of(parsed)["a"]["data"]["values"] == [{"x": rude}]
    assert "".join(parsed.texts["h1"]) == rude
    notebook = Parsed(grids_html(rude, Grid(rude, (rude,), ((rude,),)), lines=(rude,)))
    assert [tag for tag, _ in notebook.elements if tag == "script"] == []
    assert "".join(notebook.texts["td"]) == rude


def test_commands_are_code() -> None:
    lines = ("run `a <b>` or `c`", "a lone ` is none")
    shown = Parsed(grids_html("f", Grid("g", ("h",), (("`i`",),)), lines=lines))
    assert sorted(shown.texts["code"]) == ["a <b>", "c", "i"]
    assert "a lone ` is none" in shown.texts["p"]


def test_the_same_plan_gives_the_same_page() -> None:
    assert page_html(page("plan")) == html("plan")
