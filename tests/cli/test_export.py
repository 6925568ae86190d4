"""`bigplan export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file

from bigplan.graph.strategy import Strategy
from bigplan.spec.hf.config import load_hf_config
from tests.cli.conftest import Run
from tests.runtime.harness import started
from tests.runtime.linear.lora_ranks import frozen
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of the first and the second step."""
    one, two = kind_placement(1), kind_placement(2)
    model, training = tiny_model(), tiny_training(2, precision="bf16")
    plan = plan_of(model, training, Strategy(dp=1), placed(embedding=one, block=two, head=one))
    with started(plan) as worker:
        for _ in range(2):
            worker.step()
            worker.save(tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_the_newest_checkpoint_of_a_run(bigplan: Run, run: Path, tmp_path: Path) -> None:
    code, out, _ = bigplan("export", run, "--to", "out")
    assert code == 0
    assert "Wrote tiny after step 2 to out" in out
    assert "in bf16" in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")
    weights = tmp_path / "out" / "model.safetensors"
    assert "model.layers.1.mlp.up_proj.weight" in load_file(weights)
    assert weights.stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode


def test_adapters_or_the_model_with_them(bigplan: Run, run: Path, tmp_path: Path) -> None:
    model, training = tiny_model(), tiny_training(2, precision="bf16", lora={"rank": 2})
    placement = placed(embedding=frozen(1), block=frozen(2), head=frozen(1))
    with started(plan_of(model, training, Strategy(dp=1), placement)) as worker:
        worker.step()
        worker.save(tmp_path / "adapted" / "checkpoints")
    code, out, _ = bigplan("export", "adapted", "--to", "adapters")
    assert (code, "in fp32" in out) == (0, True)
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    shape = tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"].shape
    assert shape == (2, model.hidden)
    code, out, _ = bigplan("export", "adapted", "--to", "merged", "--merged", "--json")
    told = json.loads(out)
    assert (code, told["parameters"], told["dtype"]) == (0, model.parameter_count, "bf16")
    code, _, err = bigplan("export", run, "--to", "out", "--merged")
    assert (code, "leave --merged out" in err) == (2, True)


def test_the_model_of_adapters_that_has_moved(bigplan: Run, run: Path, tmp_path: Path) -> None:
    assert bigplan("export", run, "--to", "base")[0] == 0
    model = load_hf_config(tmp_path / "base" / "config.json")
    training = tiny_training(2, weights=str(tmp_path / "base"), lora={"rank": 2})
    placement = placed(embedding=frozen(1), block=frozen(2), head=frozen(1))
    with started(plan_of(model, training, Strategy(dp=1), placement)) as worker:
        worker.save(tmp_path / "adapted" / "checkpoints")
    (tmp_path / "base").rename(tmp_path / "moved")
    for more in ((), ("--merged",)):
        code, _, err = bigplan("export", "adapted", "--to", "out", *more)
        assert (code, "--weights names its new place" in err) == (2, True)
        assert bigplan("export", "adapted", "--to", f"o{more}", "--weights", "moved", *more)[0] == 0
    merged, before = (
        load_file(tmp_path / name / "model.safetensors") for name in (f"o{more}", "moved")
    )
    assert all(torch.equal(merged[name], value.float()) for name, value in before.items())
    code, _, err = bigplan("export", run, "--to", "out", "--weights", "moved")
    assert (code, "leave --weights out" in err) == (2, True)


def test_one_checkpoint_in_another_dtype(bigplan: Run, run: Path, tmp_path: Path) -> None:
    first = run / "checkpoints" / "step-000001"
    code, out, _ = bigplan("export", first, "--to", "out", "--dtype", "fp32", "--json")
    told = json.loads(out)
    assert (code, told["step"], told["dtype"], told["passed_over"]) == (0, 1, "fp32", [])
    values = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert str(values.dtype) == "torch.float32"
    # the master copy, not the bf16 parameters, which it rounds to
    assert not values.equal(values.bfloat16().float())


def test_what_is_no_run_and_what_is_there_already(bigplan: Run, run: Path, tmp_path: Path) -> None:
    code, _, err = bigplan("export", tmp_path / "absent", "--to", "out")
    assert (code, "absent: no such file or folder" in err) == (2, True)
    (tmp_path / "out").mkdir()
    code, _, err = bigplan("export", run, "--to", "out")
    assert (code, "out exists already" in err) == (2, True)


def test_a_damaged_checkpoint_is_found_and_nothing_left(
    bigplan: Run, run: Path, tmp_path: Path
) -> None:
    damaged = sorted((run / "checkpoints" / "step-000002").glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-5000] ^= 1
    damaged.write_bytes(data)
    code, _, err = bigplan("export", run, "--to", "out")
    assert code == 6
    assert "are not those that were written" in err
    assert not list(tmp_path.glob("out*"))
