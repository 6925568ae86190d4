"""Training that goes on from adapters as peft has them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from bigplan.content import ADAPTERS
from bigplan.errors import InputError, RefusedError
from bigplan.plan import Plan
from bigplan.rectangle import Rectangle
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.export.peft import export_adapters, export_merged
from bigplan.runtime.memory.adapter_rows import NAME, adapter_parameters
from bigplan.runtime.weights.first_values import stored_values, whole_values
from bigplan.runtime.weights.peft_experts import products
from bigplan.spec.hf.peft import CONFIG, WEIGHTS
from bigplan.spec.lora import RETURNING, targets_of
from bigplan.spec.training import TrainingRequest, resolve
from tests.runtime.checkpoints import running
from tests.runtime.export.test_peft import (
    CASES,
    EXPERTS,
    STEPS,
    _loaded,
    _logits,
    _model,
    _trained,
    lora_plan,
)
from tests.runtime.harness import started
from tests.runtime.linear.test_lora import CLOSE, adapters_of
from tests.runtime.weights.hf_models import LENGTH, reference

# Whose modules are made of what those of other cases are.
LIKE_OTHERS = {"llama-stabilised", "gpt2-some", "mixtral", "glm4-moe", "granite-hybrid"}


def _exported(case: str, tmp_path: Path, **lora: object) -> tuple[Plan, Path]:
    """A run's plan, and its adapters after some steps as peft has them."""
    _, plan = lora_plan(tmp_path / "in", _model(case), **CASES[case] | lora)
    _trained(plan, tmp_path / "run")
    export_adapters(latest(tmp_path / "run"), tmp_path / "adapters", "fp32")
    return plan, tmp_path / "adapters"


def _resumed(plan: Plan, adapters: Path, **stated: object) -> Plan:
    """The same training that starts from a folder and is told nothing else."""
    request = TrainingRequest.model_validate(
        {"weights": plan.training.weights, "sequence_length": LENGTH, "global_batch": 2}
        | {"lora": {"weights": str(adapters), **stated}}
    )
    lora = resolve(request, plan.model).lora
    training = plan.training.model_copy(update={"lora": lora})
    return plan.model_copy(update={"training": training})


@pytest.mark.parametrize("case", [case for case in CASES if case not in LIKE_OTHERS])
def test_a_run_goes_on_from_what_another_exported(case: str, tmp_path: Path) -> None:
    """Rank, alpha and targets are told by the folder, and every value is its run's."""
    plan, adapters = _exported(case, tmp_path)
    stated = {"targets": CASES[case]["targets"]} if "targets" in CASES[case] else {}
    again = _resumed(plan, adapters, **stated)
    ours, theirs = again.training.lora, plan.training.lora
    assert ours is not None
    assert theirs is not None
    assert (ours.rank, ours.alpha, ours.scale) == (theirs.rank, theirs.alpha, theirs.scale)
    assert set(ours.targets or ()) == set(theirs.targets or targets_of(plan.model))
    with started(plan) as worker:
        for _ in range(STEPS):
            worker.step()
        worker.finish()
        trained = adapters_of(worker)
    with started(again) as worker:
        found = adapters_of(worker)
    assert found.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(found[name], value), name


def _changed(folder: Path, **config: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_one_adapter_of_a_fused_module_is_one_of_each_of_its_matrices(tmp_path: Path) -> None:
    """As peft makes them of GPT-2's c_attn: the model gives the same."""
    theirs: Any = reference("gpt2")
    _, plan = lora_plan(tmp_path / "in", "gpt2")
    _trained(plan, tmp_path / "run")
    export_adapters(latest(tmp_path / "run"), tmp_path / "adapters", "fp32")
    folder, rank = tmp_path / "adapters", 4
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, value in load_file(folder / WEIGHTS).items():
        shape = (rank, value.shape[1]) if "lora_A" in name else (value.shape[0], rank)
        tensors[name] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _changed(folder, rank_pattern={}, alpha_pattern={}, lora_alpha=6)
    again = _resumed(plan, folder)
    modules = dict(theirs.named_modules())
    for name in [name for name in tensors if "lora_A" in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = 6 / rank * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        with torch.no_grad():
            modules[module].weight += delta.T
    with started(again) as worker:
        worker.save(tmp_path / "merged")
    export_merged(latest(tmp_path / "merged"), tmp_path / "whole", "fp32")
    merged = _logits(_loaded(tmp_path / "whole"))
    exact = _logits(theirs.eval())
    assert (merged - exact).abs().max() < CLOSE * exact.abs().max()


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", "all-linear"),
        ("gpt2", ["c_attn"]),
        ("qwen3-moe", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("gpt-oss", {"mlp.experts.gate_up_proj"}),
    ],
)
def test_what_peft_writes_is_what_training_starts_from(
    case: str, targets: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    _, plan = lora_plan(tmp_path / "in", case)
    of_experts = isinstance(targets, set)  # parameters, which have no dropout
    told = {"target_modules": ["q_proj"], "target_parameters": sorted(targets)} if of_experts else {
        "target_modules": targets, "lora_dropout": 0.1
    }  # fmt: skip
    config = peft.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **told
    )
    theirs = peft.get_peft_model(_loaded(tmp_path / "in"), config)
    theirs.save_pretrained(tmp_path / "adapters")
    again = _resumed(plan, tmp_path / "adapters")
    assert again.training.lora is not None
    assert again.training.lora.dropout == told.get("lora_dropout", 0.0)
    with started(again) as worker:
        worker.save(tmp_path / "run")
    export_merged(latest(tmp_path / "run"), tmp_path / "whole", "fp32")
    exact, merged = _logits(theirs.eval()), _logits(_loaded(tmp_path / "whole"))
    assert (merged - exact).abs().max() < CLOSE * exact.abs().max()
    before = _logits(_loaded(tmp_path / "in"))
    assert (before - exact).abs().max() > 100 * CLOSE * exact.abs().max()


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_experts_that_are_modules_of_their_own_are_read(case: str, tmp_path: Path) -> None:
    """As peft had them with transformers 4: of each expert B A is its part of what is added."""
    _, plan = lora_plan(tmp_path / "in", case)
    words = ("w1", "w3", "w2") if case == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    inside = "block_sparse_moe" if case == "mixtral" else "mlp"
    model, adapters = plan.model, tmp_path / "adapters"
    tensors = {}
    for layer, expert, word in product(range(model.layers), range(model.experts), words):
        sides = (model.ffn, model.hidden) if word == words[2] else (model.hidden, model.ffn)
        module = f"base_model.model.model.layers.{layer}.{inside}.experts.{expert}.{word}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, sides[0])
        tensors[f"{module}.lora_B.weight"] = torch.randn(sides[1], 4)
    adapters.mkdir()
    save_file(tensors, adapters / WEIGHTS)
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": [*words]}
    (adapters / CONFIG).write_text(json.dumps(told))
    again = _resumed(plan, adapters)
    values = stored_values(again.model, again.training)
    described = {p.name: p for p in adapter_parameters(again.model, again.training.lora, [1])}
    assert len(described) == 2 * len(EXPERTS)
    for target, word in zip(EXPERTS, words, strict=True):
        a, b = (
            whole_values(values, NAME, ADAPTERS, described[f"layers.0.{target}.lora_{side}"])
            for side in "AB"
        )
        wide, narrow = (a, b) if target == RETURNING else (b, a)
        added = products(wide, narrow, 4, model.experts)
        for expert in range(model.experts):
            module = f"base_model.model.model.layers.0.{inside}.experts.{expert}.{word}"
            pair = (tensors[f"{module}.lora_{side}.weight"] for side in "BA")
            one = torch.mm(*pair)
            assert torch.allclose(
                added[expert :: model.experts], one.T if target == RETURNING else one
            )
    del tensors[f"base_model.model.model.layers.1.{inside}.experts.0.{words[1]}.lora_A.weight"]
    save_file(tensors, adapters / WEIGHTS)
    with pytest.raises(RefusedError, match=rf"{model.experts - 1} of {model.experts} experts"):
        _resumed(plan, adapters)


def test_any_part_of_an_adapter_is_that_of_the_whole(tmp_path: Path) -> None:
    """Ranks read their own rows and columns alone."""
    plan, adapters = _exported("phi3", tmp_path)
    again = _resumed(plan, adapters)
    values = stored_values(again.model, again.training)
    for described in adapter_parameters(again.model, again.training.lora, [1]):
        whole = whole_values(values, NAME, ADAPTERS, described)
        rows, columns = whole.shape
        part = Rectangle(described.name, rows // 4, rows, columns // 2, columns)
        assert torch.equal(values(NAME, ADAPTERS, described, part), whole[part.in_matrix])


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"rank": 8}, "lora.rank is 8, but the adapters in .* have 4"),
        ({"alpha": 1.0}, "lora.alpha is 1.0, but .* have 8.0"),
        ({"targets": ["q_proj"]}, "lora.targets is q_proj, but .* have q_proj, k_proj"),
        ({"rank_stabilised": True}, "lora.rank_stabilised is True, but .* have False"),
    ],
)
def test_what_is_stated_besides_has_to_agree(
    stated: dict[str, object], told: str, tmp_path: Path
) -> None:
    plan, adapters = _exported("llama", tmp_path)
    with pytest.raises(InputError, match=told):
        _resumed(plan, adapters, **stated)


def test_dropout_may_be_stated_besides(tmp_path: Path) -> None:
    plan, adapters = _exported("llama", tmp_path)
    _changed(adapters, lora_dropout=0.1)
    found = [_resumed(plan, adapters, **told).training.lora for told in ({}, {"dropout": 0.0})]
    assert [lora and lora.dropout for lora in found] == [0.1, 0.0]


def test_folders_that_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    plan, adapters = _exported("llama", tmp_path)
    config, tensors = (adapters / CONFIG).read_text(), load_file(adapters / WEIGHTS)
    first = next(name for name in tensors if "layers.0" in name and "q_proj.lora_A" in name)
    cases: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "DoRA": ({"use_dora": True}, {}),
        "peft_type IA3": ({"peft_type": "IA3"}, {}),
        "has to be a number above 0": ({"r": 0}, {}),
        "lora_dropout is 1": ({"lora_dropout": 1}, {}),
        "all count alike": ({"alpha_pattern": {"q_proj": 3}}, {}),
        "is no adapter of a product": ({}, {"base_model.model.lm_head.lora_A.weight": 1}),
        "has the shape": ({}, {first: torch.zeros(4, 5)}),
        "has the rank 2": ({"lora_alpha": 8}, {first: "half"}),
        "not all 2 blocks": ({}, {first: None}),
    }
    for told, (changes, values) in cases.items():
        with subtests.test(told):
            (adapters / CONFIG).write_text(config)
            _changed(adapters, **changes)
            made = dict(tensors)
            for name, value in values.items():
                up = name.replace("lora_A", "lora_B")
                if value is None:
                    del made[name], made[up]
                elif value == "half":
                    made[name], made[up] = made[name][:2].clone(), made[up][:, :2].clone()
                else:
                    made[name] = value if isinstance(value, torch.Tensor) else torch.zeros(4, 4)
            save_file(made, adapters / WEIGHTS)
            with pytest.raises((InputError, RefusedError), match=told):
                _resumed(plan, adapters)
    (adapters / WEIGHTS).write_bytes(b'\x10\0\0\0\0\0\0\0{"a": 1}')
    with pytest.raises(InputError, match="cut off or damaged"):
        _resumed(plan, adapters)
    with pytest.raises(InputError, match=f"has no {CONFIG}"):
        _resumed(plan, tmp_path / "in")


def test_adapters_that_their_weights_have_already(tmp_path: Path) -> None:
    """They would count twice. Later ones of the same run, and files of others, say nothing."""
    plan, adapters = _exported("llama", tmp_path)
    export_merged(latest(tmp_path / "run"), tmp_path / "merged", "bf16")
    training = plan.training.model_copy(update={"weights": str(tmp_path / "merged")})
    merged = plan.model_copy(update={"training": training})
    with pytest.raises(InputError, match="added already"):
        _resumed(merged, adapters)
    assert _resumed(plan, adapters).training.lora is not None
    save_file(load_file(adapters / WEIGHTS), adapters / WEIGHTS, metadata={"format": "pt"})
    assert _resumed(merged, adapters).training.lora is not None


def test_a_plan_for_another_machine_states_its_rank(tmp_path: Path) -> None:
    _, plan = lora_plan(tmp_path / "in", "llama")
    away = _resumed(plan, tmp_path / "elsewhere", rank=4)
    with pytest.raises(InputError, match=f"has no {CONFIG}"):
        stored_values(away.model, away.training)


def test_a_checkpoint_needs_the_folder_no_more(tmp_path: Path) -> None:
    plan, adapters = _exported("llama", tmp_path)
    again = _resumed(plan, adapters)
    with started(again) as worker:
        worker.step()
        worker.save(tmp_path / "second")
        trained = adapters_of(worker)
    (adapters / CONFIG).unlink()
    with running(again, tmp_path / "second") as (worker, _):
        for name, value in adapters_of(worker).items():
            assert torch.equal(value, trained[name]), name
