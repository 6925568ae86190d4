"""Data of a run, as it was when it began and as it is."""

from pathlib import Path

from bigplan.launcher.inputs import cut_short, data_sizes
from bigplan.spec.training import ValidationSpec
from tests.launcher.fakes import plan_with


def test_a_file_of_the_data_that_was_cut_short(tmp_path: Path) -> None:
    folder, text = tmp_path / "prepared", tmp_path / "text.txt"
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(b"1234")
    text.write_text("some text")
    held_out = ValidationSpec(data=str(folder))
    sizes = data_sizes(plan_with(data=str(text), validation=held_out).training)
    assert sizes == {text: 9, folder / "tokens.bin": 4}
    text.write_text("some longer text")
    assert not cut_short(sizes)
    (folder / "tokens.bin").unlink()  # stays whole for those who have it open
    assert not cut_short(sizes)
    (folder / "tokens.bin").write_bytes(b"1")
    assert f"data {folder / 'tokens.bin'} was cut from 4 to 1 bytes" in cut_short(sizes)


def test_data_that_is_not_here_or_ships() -> None:
    assert data_sizes(plan_with(data="nowhere").training) == {}
    assert data_sizes(plan_with(data="bundled").training) == {}
    assert data_sizes(plan_with(data=None).training) == {}
