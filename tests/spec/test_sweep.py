"""Experiments of a sweep: which there are, and mistakes told with their line."""

from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.experiment import load_experiment
from bigplan.spec.files.json_schema import json_schema
from bigplan.spec.sweep import Study, load_study

BASE = """\
model: tiny-llama-test
cluster: rtx-4090-workstation
training:
  sequence_length: 32
  precision: fp32
"""
SWEEP = """\
sweep:
  grid:
    training.tokens_per_step:
      - 128
      - 256
    hardware.nvme.drives: [1, 2]
  zip:
    engine: [native, any]
    set.micro_batch: [1, 2]
  points:
    - {caps.gpu: 16 GiB}
    - {}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_every_combination_the_last_key_of_the_grid_fastest(tmp_path: Path) -> None:
    studied = load_study(write(tmp_path, BASE + SWEEP))
    assert len(studied.points) == studied.study.sweep.count == 2 * 2 * 4
    assert [point.index for point in studied.points] == list(range(16))
    first, second, last = studied.points[0], studied.points[1], studied.points[-1]
    assert dict(first.values) == {
        "caps.gpu": "16 GiB",
        "engine": "native",
        "set.micro_batch": 1,
        "training.tokens_per_step": 128,
        "hardware.nvme.drives": 1,
    }
    assert second.values["hardware.nvme.drives"] == 2
    assert "caps.gpu" not in last.values
    assert last.experiment.resolved_training().global_batch == 8
    assert last.experiment.set == {"micro_batch": 2}
    assert first.experiment.cluster_spec().group.gpu.memory == 16 * 2**30
    assert studied.keys[0] == "caps.gpu"


def test_a_file_without_a_sweep_is_one_point(tmp_path: Path) -> None:
    (point,) = load_study(write(tmp_path, BASE)).points
    assert (point.index, dict(point.values)) == (0, {})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = BASE + "sweep: {grid: {cluster: [./c.yaml, dgx-h100], training.data: [a.txt]}}\n"
    points = load_study(write(tmp_path, text)).points
    assert [point.experiment.cluster for point in points] == [str(tmp_path / "c.yaml"), "dgx-h100"]
    assert points[0].experiment.training.data == str(tmp_path / "a.txt")


def test_keys_of_a_named_model(tmp_path: Path) -> None:
    text = BASE + "sweep: {grid: {model.layers: [3, 5]}}\n"
    points = load_study(write(tmp_path, text)).points
    assert [point.experiment.model_spec().layers for point in points] == [3, 5]


def test_text_stays_text(tmp_path: Path) -> None:
    text = BASE + "sweep: {grid: {training.data: ['12', 'null']}}\n"
    points = load_study(write(tmp_path, text)).points
    assert [Path(str(p.experiment.training.data)).name for p in points] == ["12", "null"]


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("      - 256", "      - x", 10, "`training.tokens_per_step`: 'x' is not a number"),
        ("[native", "[natve", 13, "`engine` is 'natve'.* did you mean 'native'"),
        ("tokens_per_step:", "tokns_per_step:", 9, "did you mean 'tokens_per_step'"),
        ("  grid:", "  gird:", 7, "unknown key 'gird' in `sweep`; did you mean 'grid'"),
        ("nvme.drives:", "nvme.drive:", 11, "did you mean 'nvme.drives'"),
        ("native, any]", "native]", 6, "side by side, but engine has 1, set.micro_batch has 2"),
        ("set.micro_batch", "prefer", 14, "cannot say prefer, which is the same for all"),
        ("set.micro_batch", "set", 14, "cannot say set, which is the same for all"),
        ("[1, 2]\n  zip", "[]\n  zip", 6, "sweep.grid.hardware.nvme.drives has no values"),
        ("caps.gpu: 16 GiB", "engine: any", 6, "sweep has engine in two of grid, zip and points"),
        ("caps.gpu: 16 GiB", "caps.gpu: 16 GB", None, ""),
        ("caps.gpu: 16 GiB", "caps.gpu: 16 Gx", 16, "`caps.gpu`: '16 Gx' has the unit 'Gx'"),
    ],
)
def test_mistakes_have_their_line(
    tmp_path: Path, old: str, new: str, line: int | None, told: str
) -> None:
    path = write(tmp_path, BASE + SWEEP.replace(old, new, 1))
    if line is None:
        load_study(path)
        return
    with pytest.raises(InputError, match=told) as error:
        load_study(path)
    assert str(error.value).startswith(f"{path}:{line}: ")


def test_too_many_points(tmp_path: Path) -> None:
    numbers = list(range(1, 102))
    grid = f"{{training.seed: {numbers}, training.global_batch: {numbers}}}"
    with pytest.raises(InputError, match=r"10,201 combinations, and at most 10,000"):
        load_study(write(tmp_path, f"{BASE}sweep: {{grid: {grid}}}\n"))


@pytest.mark.parametrize(
    ("find", "told"),
    [
        ("{largest: training.global_batch, least: 5, most: 7, multiple_of: 4}", "there is none"),
        ("{largest: launch.steps}", "cannot say launch.steps"),
        ("{largst: x}", "did you mean 'largest'"),
        ("{largest: training.global_bach}", "did you mean 'global_batch'"),
        ("{largest: micro_batch}", "unknown key 'micro_batch'; did you mean 'set'"),
    ],
)
def test_mistakes_of_find(tmp_path: Path, find: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_study(write(tmp_path, f"{BASE}find: {find}\n"))


def test_measure_is_a_word_or_a_number(tmp_path: Path) -> None:
    assert load_study(write(tmp_path, BASE + "measure: 2\n")).study.measure == 2
    with pytest.raises(InputError, match="measure is 0; write none, all, or a number from 1 on"):
        load_study(write(tmp_path, BASE + "measure: 0\n"))


def test_one_plan_is_not_made_of_many_experiments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds many experiments .* `bigplan experiment run"):
        load_experiment(write(tmp_path, BASE + SWEEP))


def test_the_schema_has_the_sweep() -> None:
    schema = json_schema(Study)
    assert {"sweep", "find", "measure", "training"} <= schema["properties"].keys()
    assert "every combination" in schema["$defs"]["Sweep"]["properties"]["grid"]["description"]


def test_within_needs_a_number_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"add\s+training.tokens"):
        load_study(write(tmp_path, BASE + "within: 30 d\n"))
