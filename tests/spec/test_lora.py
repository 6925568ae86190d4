"""LoRA as users write it, and what it makes of a model's layers."""

from __future__ import annotations

import math

import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model
from bigplan.spec.lora import (
    Lora,
    adapted_steps,
    adapters,
    check_lora,
    passed_count,
    stored,
    targets_of,
    trained,
    trained_count,
)
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, ParameterGroup, check_groups, rules
from bigplan.spec.step import StepOp
from bigplan.spec.training import Training, TrainingRequest, resolve

LLAMA = find_model("llama-3-8b")
ATTENTION = Lora(rank=8, targets=("q_proj", "v_proj"))


def _resolved(lora: Lora, model: ModelSpec = LLAMA) -> Training:
    return resolve(TrainingRequest.model_validate({"lora": lora.model_dump()}), model)


def test_a_rank_is_needed() -> None:
    with pytest.raises(ValueError, match="lora has no rank; write one, such as 16"):
        TrainingRequest.model_validate({"lora": {"alpha": 8}})


def test_defaults_and_scales() -> None:
    assert (Lora(rank=16).alpha, Lora(rank=16).scale) == (32.0, 2.0)
    assert Lora(rank=16, alpha=8).scale == 0.5
    assert math.isclose(Lora(rank=16, alpha=8, rank_stabilised=True).scale, 2.0)


def test_parameters_that_are_trained() -> None:
    """Rank x (in + out) for each target: of all products, and of queries and values."""
    hidden, keys, inner = 4096, 1024, 14336
    attention = 4 * hidden + 2 * (hidden + keys)  # queries and output, keys and values
    assert trained_count(LLAMA, Lora(rank=16)) == 32 * 16 * (attention + 3 * (hidden + inner))
    assert trained_count(LLAMA, ATTENTION) == 32 * 8 * (2 * hidden + hidden + keys)
    assert trained_count(LLAMA, None) == LLAMA.parameter_count
    assert trained(LLAMA, "head", ATTENTION) == ()


def test_ranks_split_b_of_a_matrix_by_rows_and_a_of_one_by_columns() -> None:
    found = {p.name: p for p in adapters(LLAMA, Lora(rank=8))}
    assert found["k_proj.lora_A"].local(16) == (8, 4096)
    assert found["k_proj.lora_A"].holders(16) == 16
    # Eight heads of keys: of 16 ranks two neighbours have the same.
    assert found["k_proj.lora_B"].local(16) == (128, 8)
    assert found["k_proj.lora_B"].holders(16) == 2
    assert found["down_proj.lora_A"].local(4) == (8, 14336 // 4)
    assert found["down_proj.lora_B"].local(4) == (4096, 8)
    assert found["down_proj.lora_B"].holders(4) == 4


def test_a_frozen_product_keeps_its_input_for_an_adapter_alone() -> None:
    steps = {s.name: s for s in adapted_steps(LLAMA, "block", ATTENTION) if s.op is StepOp.PRODUCT}
    kept = [name for name, step in steps.items() if step.saves]
    assert kept == ["query, key, value"]
    names = [p.name for p in steps["query, key, value"].adapters]
    assert names == ["q_proj.lora_A", "v_proj.lora_A", "q_proj.lora_B", "v_proj.lora_B"]
    assert not any(step.adapters for step in adapted_steps(LLAMA, "head", Lora(rank=8)))


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (Lora(rank=8, targets=("q_prj",)), "did you mean 'q_proj'?"),
        (Lora(rank=8, targets=("lm_head",)), "no such product"),
        (Lora(rank=8, targets=()), "lora.targets is empty"),
        (Lora(rank=8, targets=("q_proj", "q_proj")), "names a product twice"),
    ],
)
def test_targets_that_are_refused(lora: Lora, told: str) -> None:
    with pytest.raises(InputError) as caught:
        _resolved(lora)
    assert told in str(caught.value)


def test_what_does_not_go_with_adapters() -> None:
    for key in ({"fp8_gemms": True}, {"dropout": 0.1}):
        with pytest.raises(InputError, match="does not go with lora"):
            resolve(TrainingRequest.model_validate({"lora": {"rank": 8}, **key}), LLAMA)


def test_adapters_of_experts_drop_nothing() -> None:
    mixtral, targets = find_model("mixtral-8x7b"), ["q_proj", "experts.up_proj"]
    for names in (None, targets[:1]):
        lora = {"rank": 8, "targets": names, "dropout": 0.1}
        found = resolve(TrainingRequest.model_validate({"lora": lora}), mixtral).lora
        assert found is not None
        assert found.dropout == 0.1
    with pytest.raises(InputError, match=r"lora.dropout is 0.1, .* \(experts.up_proj\)"):
        check_lora(Lora(rank=8, targets=tuple(targets), dropout=0.1), mixtral)


def test_experts_stay_as_they_are_unless_they_are_named() -> None:
    """Of a mixture attention alone has adapters, and nothing is kept for gradients of experts."""
    model = find_model("qwen3-30b-a3b")
    assert targets_of(model) == ("q_proj", "k_proj", "v_proj", "o_proj")
    hidden, heads, keys = (
        model.hidden,
        model.heads * model.head_dim,
        model.kv_heads * model.head_dim,
    )
    wide = 2 * (hidden + heads) + 2 * (hidden + keys)
    assert trained_count(model, Lora(rank=8)) == model.layers * 8 * wide
    saved = {v.name for s in adapted_steps(model, "block", Lora(rank=8)) for v in s.saves}
    assert {"gate", "up", "router scores"} <= saved
    assert not {"mlp input", "inner"} & saved
    with pytest.raises(InputError, match=r"no such product.*routers stay"):
        _resolved(Lora(rank=8, targets=("gate_proj",)), model)
    packed = Lora(rank=8, frozen="nf4")
    before, after = (
        {p.name: p.count for p in stored(model, "block", lora, 2)} for lora in (None, packed)
    )
    changed = {name for name, count in after.items() if count < before[name]}
    experts = {f"experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert changed == experts | {f"{name}_proj.weight" for name in "qkvo"}


def test_experts_have_an_adapter_each() -> None:
    model = find_model("qwen3-30b-a3b")
    lora = Lora(rank=8, targets=("experts.up_proj", "experts.down_proj"))
    each = 8 * (model.hidden + model.ffn)
    assert trained_count(model, lora) == model.layers * model.experts * 2 * each
    assert passed_count(model, lora) == model.layers * model.experts_per_token * 2 * each
    found = {p.name: p for p in adapters(model, lora)}
    # Of two ranks each has all that reads or gives hidden states, and half of the rest.
    whole, half = (8, model.experts * model.hidden), (model.ffn // 2, model.experts * 8)
    for name, shape in (("up_proj.lora_A", whole), ("up_proj.lora_B", half)):
        assert found[f"experts.{name}"].local(2) == shape
    for name, shape in (("down_proj.lora_A", half), ("down_proj.lora_B", whole)):
        assert found[f"experts.{name}"].local(2) == shape
    saved = {v.name for s in adapted_steps(model, "block", lora) for v in s.saves}
    assert {"mlp input", "inner"} <= saved
    last = Lora(rank=8, targets=("experts.down_proj",))
    assert "mlp input" not in {v.name for s in adapted_steps(model, "block", last) for v in s.saves}


def test_a_shared_experts_gate_and_a_routers_bias_are_not_packed() -> None:
    model = find_model("qwen2-57b-a14b")
    routing = {"scores": "sigmoid", "bias": True}
    model = ModelSpec.model_validate(model.model_dump() | {"routing": routing, "router_loss": 0.0})
    lora = Lora(rank=8, frozen="nf4")
    assert "shared.up_proj" in targets_of(model)
    assert "shared_gate" not in targets_of(model)
    after = {p.name: p.shape for p in stored(model, "block", lora, 2)}
    same = {p.name for p in model.kinds()["block"] if p.shape == after[p.name]}
    assert {"router.weight", "router.bias", "shared_gate.weight"} <= same
    assert not {"shared.up_proj.weight", "experts.up_proj.weight"} & same


def test_each_kind_of_block_has_adapters_of_its_own_products() -> None:
    """GLM-4.5-Air's first block has an MLP in place of experts, and is counted once."""
    model, lora = find_model("glm-4.5-air"), Lora(rank=8)
    shared = ("shared.gate_proj", "shared.up_proj", "shared.down_proj")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert targets_of(model, ["dense"]) == (*attention, "gate_proj", "up_proj", "down_proj")
    assert targets_of(model, ["block"]) == (*attention, *shared)
    assert set(targets_of(model)) == {*targets_of(model, ["dense"]), *shared}
    down = Lora(rank=8, targets=("down_proj",))
    assert trained_count(model, down) == 8 * (model.hidden + model.dense_ffn)
    each = {k: sum(p.count for p in adapters(model, lora, k)) for k in ("dense", "block")}
    assert trained_count(model, lora) == each["dense"] + (model.layers - 1) * each["block"]


def test_products_of_other_mixers_have_adapters_and_filters_have_none() -> None:
    lfm2, next80 = find_model("lfm2-1.2b"), find_model("qwen3-next-80b-a3b")
    assert set(targets_of(lfm2, ["convolution"])) >= {"conv.before_proj", "conv.out_proj"}
    rule = targets_of(next80, ["delta_rule"])
    assert {"delta.q_proj", "delta.z_proj", "delta.out_proj", "shared.up_proj"} <= {*rule}
    assert not any("conv.weight" in name or name.startswith("experts") for name in rule)
    packed = {p.name: p.shape for p in stored(next80, "delta_rule", Lora(rank=8, frozen="nf4"), 2)}
    whole = {p.name: p.shape for p in next80.kinds()["delta_rule"]}
    changed = {name for name in whole if packed[name] != whole[name]}
    assert "delta.q_proj.weight" in changed
    assert not {"delta.q_conv.weight", "router.weight"} & changed
    assert all(f"{name}.weight" in changed for name in rule)


def test_groups_of_the_optimizer_name_adapters() -> None:
    group = ParameterGroup(match="*.lora_B", learning_rate_factor=16.0, weight_decay=0.0)
    optimizer = Optimizer(groups=(group,))
    check_groups(optimizer, LLAMA, ATTENTION)
    assert set(rules(optimizer, LLAMA, 1, ATTENTION)) == {
        p.name for p in adapters(LLAMA, ATTENTION)
    }
    assert rules(optimizer, LLAMA, 1, ATTENTION)["q_proj.lora_B"] == (0.0, 16.0)
    assert rules(optimizer, LLAMA, 0, ATTENTION) == {}
    frozen = Optimizer(groups=(ParameterGroup(match="*.input_norm.weight", weight_decay=0.0),))
    with pytest.raises(InputError, match="no such parameter"):
        check_groups(frozen, LLAMA, ATTENTION)


def test_trainings_without_adapters_are_written_as_before() -> None:
    plain = resolve(TrainingRequest(), LLAMA)
    assert "lora" not in plain.model_dump()
    assert "dropout" not in _resolved(ATTENTION).model_dump()["lora"]
    assert _resolved(ATTENTION).model_dump()["lora"]["targets"] == ("q_proj", "v_proj")
