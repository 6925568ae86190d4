import json

import pytest

from bigplan.cli.as_json import FORMAT
from bigplan.doctor import Finding
from tests.cli.conftest import Run

GOOD = Finding("a", "one", "good", "fine")
NOTE = Finding("a", "two", "note", "slow [b]", "be quick")
BAD = Finding("b", "three", "bad", "broken", "mend it")


@pytest.mark.parametrize(("found", "code"), [((GOOD, NOTE), 0), ((GOOD, NOTE, BAD), 4)])
def test_what_is_wrong_decides_the_exit_code(
    bigplan: Run, monkeypatch: pytest.MonkeyPatch, found: tuple[Finding, ...], code: int
) -> None:
    monkeypatch.setattr("bigplan.doctor.examine", lambda folder: iter(found))
    ended, out, err = bigplan("doctor")
    assert (ended, err) == (code, "")
    assert "slow [b]" in out
    assert "-> be quick" in out
    ended, out, err = bigplan("doctor", "--json")
    assert (ended, err) == (code, "")
    told = json.loads(out)
    assert told["format"] == FORMAT
    assert [one["state"] for one in told["findings"]] == [one.state for one in found]
    assert told["findings"][1]["remedy"] == "be quick"


def test_this_machine(bigplan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but torch, which takes seconds to ask."""
    monkeypatch.setattr("bigplan.doctor.gpus._probed", lambda: {"cuda": None, "devices": []})
    _, out, err = bigplan("doctor", "--json")
    topics = {one["topic"] for one in json.loads(out)["findings"]}
    assert {"installed", "engines", "machine", "drive", "compiler", "network and Ray"} <= topics
    assert err == ""
