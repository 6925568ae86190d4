from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.files import shipped
from bigplan.spec.files.document import Spec


class Thing(Spec):
    size: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small-1.yaml").write_text("size: 1")
    (tmp_path / "large-9.yaml").write_text("size: 9")
    (tmp_path / "notes.txt").write_text("no description")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.yaml").write_text("size: 2")
    return tmp_path


def test_found_by_name(folder: Path) -> None:
    assert shipped.names(folder) == ("large-9", "small-1")
    assert shipped.find(folder, "large-9", Thing, "thing") == Thing(size=9)


@pytest.mark.parametrize("name", ["large", "../large-9", "inner/other", "LARGE-9"])
def test_only_by_its_own_name(folder: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        shipped.find(folder, name, Thing, "thing")
    assert f"no thing is called {name!r}" in str(caught.value)
    assert (
        "(shipped: large-9, small-1; or write it out as `bigplan clusters NAME` writes one)"
        in str(caught.value)
    )


def test_the_closest_name_is_offered(folder: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'small-1'"):
        shipped.find(folder, "smal-1", Thing, "thing")


@pytest.mark.parametrize(("name", "hint"), [("mall", "small-1"), ("large9", "large-9")])
def test_a_part_of_a_name_is_enough(folder: Path, name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"did you mean {hint!r}"):
        shipped.find(folder, name, Thing, "thing")


def test_a_name_that_is_a_little_alike_is_not_meant(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no thing is called 'malt' \(shipped"):
        shipped.find(folder, "malt", Thing, "thing")
