"""Which blocks have what mixes their tokens, and what no such model has."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from bigplan.capabilities.native import native_refusal
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import splits_over_context_parallel, splits_over_tensor_parallel
from bigplan.spec.catalog import find_model
from bigplan.spec.mixers import StateSpace
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

RULE = {"key_heads": 2, "value_heads": 4}
SPACE = {"heads": 8, "groups": 2}
EXPERTS: dict[str, object] = {"experts": 4, "experts_per_token": 2}
ALONE: dict[str, object] = {"mixer_pattern": ["1 convolution", "1 mlp", "1 attention"]}


def model(**changes: object) -> ModelSpec:
    fields = {
        "name": "mixed",
        "layers": 5,
        "hidden": 32,
        "ffn": 48,
        "heads": 4,
        "vocab": 64,
        "max_sequence_length": 64,
        "convolution": {"taps": 4},
        "mixer_pattern": ["2 convolution", "1 attention"],
        "source": "test",
    }
    return ModelSpec.model_validate(fields | changes)


def test_each_kind_of_block_sees_a_model_whose_blocks_are_like_it() -> None:
    spec = model(**EXPERTS, dense_blocks=1, dense_ffn=80)
    kinds = ("dense_convolution", "convolution", "block", "convolution", "convolution")
    assert spec.layer_sequence() == ("embedding", *kinds, "head")
    for kind in kinds:
        seen = spec.seen_by(kind)
        assert seen.layer_sequence() == ("embedding", *("block",) * 5, "head")
        assert seen.kinds()["block"] == spec.kinds()[kind]
        assert seen.mixer == ("attention" if kind == "block" else "convolution")
        assert (seen.experts, seen.ffn) == ((0, 80) if kind.startswith("dense") else (4, 48))


def test_a_block_may_be_one_thing_alone() -> None:
    spec = model(**ALONE, **EXPERTS)
    kinds = ("convolution", "mlp", "block", "convolution", "mlp")
    assert spec.layer_sequence() == ("embedding", *kinds, "head")
    for kind, mixer in (("convolution", "convolution"), ("block", "attention"), ("mlp", "mlp")):
        seen = spec.seen_by(kind)
        assert seen.mixer == mixer
        assert (seen.has_mlp, seen.experts) == ((True, 4) if kind == "mlp" else (False, 0))
        assert seen.kinds()["block"] == spec.kinds()[kind]
        norms = [one.name for one in spec.kinds()[kind] if "norm" in one.name]
        assert norms == ["post_norm.weight" if kind == "mlp" else "input_norm.weight"]
    assert spec.routed_blocks == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"convolution": None}, "`mixer_pattern` has convolution blocks, but `convolution`"),
        ({"mixer_pattern": ["2 conv"]}, "`mixer_pattern` has '2 conv'; write runs of blocks"),
        ({"mixer_pattern": ["1 convolution"]}, "makes all blocks alike"),
        ({"mixer_pattern": ["9 attention", "1 convolution"]}, "without convolution blocks in"),
        ({**EXPERTS, "dense_blocks": 3, "dense_ffn": 8}, "leaves no block with attention after `d"),
        ({"norms": "after"}, "`convolution` with `norms: after`"),
        (
            {**EXPERTS, "dense_blocks": 1, "dense_ffn": 8}
            | {"attention_pattern": ["1 local", "1 global"], "sliding_window": 5},
            "`convolution` with `attention_pattern`",
        ),
        (ALONE | {"norms": "after"}, "`mlp` in `mixer_pattern` with `norms: after`, but a block"),
        (ALONE | {"ffn": 0}, "`ffn` 0, which leaves blocks without an MLP, with `mlp` in"),
        (ALONE | {"mixer_pattern": ["1 convolution", "1 mlp"]}, "leaves no block with attention"),
        ({"ffn": 0, **EXPERTS}, "`ffn` 0, which leaves blocks without an MLP, with `experts` 4"),
        ({"ffn": 0, "residual_scale": 0.5}, "`ffn` 0 with `residual_scale` 0.5"),
        (EXPERTS | {"mlp": "relu2", "mlp_bias": True}, "with `mlp: relu2` and `mlp_bias`"),
        ({"positions": "alibi"}, "`convolution` with `positions: alibi`"),
        ({"delta_rule": RULE}, "`delta_rule` with a `mixer_pattern` without delta_rule blocks"),
        ({"delta_rule": RULE, "mixer_pattern": []}, "`convolution` and `delta_rule` without"),
        ({"state_space": SPACE}, "`state_space` with a `mixer_pattern` without state_space blocks"),
        ({"state_space": SPACE | {"groups": 3}}, "`heads` 8 is not a multiple of `groups` 3"),
        (
            {"state_space": SPACE | {"least_step": 2, "most_step": 1}},
            "`most_step` 1 is below `least_step` 2",
        ),
        ({"attention_beside": {}}, "`attention_beside` is of models whose blocks all have a"),
        (
            {"convolution": None, "mixer_pattern": [], "attention_beside": {}},
            "have a `state_space`",
        ),
        ({"state_space": SPACE | {"scales": [0.5]}}, "`scales` has 1 of five numbers; state"),
        (ALONE | {"gate_scale": 0.5}, "`gate_scale` 0.5 with blocks without an MLP"),
        (
            {"convolution": None, "mixer_pattern": [], "mlp_scale": 0.5, **EXPERTS},
            "`mlp_scale` 0.5 with `experts` 4",
        ),
        (
            {"convolution": None, "mixer_pattern": [], "gate_scale": 0.5, "mlp": "gelu"},
            "`gate_scale` 0.5 with `mlp: gelu`",
        ),
        ({"delta_rule": RULE | {"value_heads": 3}}, "`value_heads` 3 is not a multiple of"),
        (
            {"convolution": None, "delta_rule": RULE | {"norms_before": True}, "norms": "after"}
            | {"mixer_pattern": []},
            "`delta_rule` with `norms: after`",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model(**changes)
    assert words in str(caught.value)


def test_what_is_not_planned_is_refused_by_name() -> None:
    training = Training.model_validate({"sequence_length": 16, "global_batch": 1})
    few = native_refusal(model(), training, Strategy(dp=1, cp=8))
    assert "a convolution of 4 taps reads 3 of the rank before" in str(few)
    assert native_refusal(model(), training, Strategy(dp=1, cp=4)) is None


def test_ranks_have_equal_parts_of_heads_of_a_delta_rule() -> None:
    spec = model(convolution=None, delta_rule=RULE, mixer_pattern=["2 delta_rule", "1 attention"])
    training = Training.model_validate({"sequence_length": 16, "global_batch": 1})
    assert native_refusal(spec, training, Strategy(dp=1, cp=2, tp=2)) is None
    assert splits_over_tensor_parallel(spec, 2)
    assert not splits_over_tensor_parallel(spec, 4)
    assert [splits_over_context_parallel(spec, 1, cp) for cp in (2, 4, 8)] == [True, True, False]
    assert splits_over_context_parallel(spec, 2, 2)  # of one key head, two value heads


def test_ranks_have_equal_parts_of_heads_of_a_state_space() -> None:
    pattern = ["2 state_space", "1 attention"]
    spec = model(convolution=None, state_space=SPACE, mixer_pattern=pattern, heads=8)
    training = Training.model_validate({"sequence_length": 16, "global_batch": 1})
    apart = training.model_copy(update={"isolate_documents": True})
    assert native_refusal(spec, apart, Strategy(dp=1, cp=2, tp=2)) is None
    one = spec.model_copy(update={"state_space": StateSpace(heads=8)})
    splits = [[splits_over_tensor_parallel(some, tp) for tp in (2, 4)] for some in (spec, one)]
    assert splits == [[True, False], [True, True]]
    odd = spec.model_copy(update={"state_space": StateSpace(heads=12, groups=3)})
    splits = [[splits_over_context_parallel(some, 1, n) for n in (2, 4)] for some in (spec, odd)]
    assert splits == [[True, True], [False, False]]


def test_the_shipped_one_has_attention_where_its_file_says() -> None:
    mixers = find_model("lfm2-1.2b").mixers
    assert [n for n, mixer in enumerate(mixers) if mixer == "attention"] == [2, 5, 8, 10, 12, 14]
