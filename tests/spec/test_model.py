import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError
from bigplan.spec.files.document import parse_document, validate
from bigplan.spec.model import ModelSpec

_BASE = {
    "name": "m",
    "layers": 2,
    "hidden": 64,
    "ffn": 128,
    "heads": 4,
    "vocab": 256,
    "max_sequence_length": 32,
    "source": "test",
}


LONGROPE: dict[str, object] = {
    "name": "longrope",
    "factor": 2.0,
    "original_length": 16,
    "short_factors": [1.0] * 8,
    "long_factors": [2.0] * 8,
}


def model(**changes: object) -> ModelSpec:
    return validate(_BASE | changes, ModelSpec, "test")


def names(spec: ModelSpec, kind: str) -> list[str]:
    return [parameter.name for parameter in spec.kinds()[kind]]


def test_defaults() -> None:
    spec = model()
    assert (spec.kv_heads, spec.head_dim, spec.attention_width, spec.kv_width) == (4, 16, 64, 64)


def test_llama_block() -> None:
    spec = model(kv_heads=2)
    assert names(spec, "block") == [
        "input_norm.weight",
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "o_proj.weight",
        "post_norm.weight",
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]
    by_name = {parameter.name: parameter for parameter in spec.kinds()["block"]}
    assert by_name["k_proj.weight"].shape == (32, 64)
    assert by_name["down_proj.weight"].shape == (64, 128)
    assert names(spec, "embedding") == ["embed_tokens.weight"]
    assert names(spec, "head") == ["norm.weight", "lm_head.weight"]
    assert names(model(tied_embeddings=True), "head") == ["norm.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"name": "linear"}}, "rope scaling linear needs `factor`; add"),
        ({"rope_scaling": {"name": "longrope", "factor": 2.0}}, "needs `original_length`, `short"),
        (
            {"rope_scaling": LONGROPE | {"long_factors": [1.0]}},
            "has 1 `long_factors`, but rope tur",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factors": [0.0]}},
            "divide frequencies; use factors ab",
        ),
        ({"rope_scaling": {"name": "linear", "factor": 2.0}, "positions": "learned"}, "remove it"),
        (
            {
                "rope_scaling": {
                    "name": "llama3",
                    "factor": 2.0,
                    "low_frequency_factor": 5.0,
                    "high_frequency_factor": 4.0,
                    "original_length": 8,
                }
            },
            "`low_frequency_factor` 5 is above `high_frequency_factor` 4",
        ),
    ],
)
def test_rope_scaling_that_makes_no_sense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**changes)


def test_gpt2_block() -> None:
    spec = model(
        norm="layernorm",
        mlp="gelu",
        positions="learned",
        tied_embeddings=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )
    assert names(spec, "embedding") == ["embed_tokens.weight", "embed_positions.weight"]
    assert names(spec, "head") == ["norm.weight", "norm.bias"]
    splits = {parameter.name: parameter.split for parameter in spec.kinds()["block"]}
    assert splits == {
        "input_norm.weight": "replicated",
        "input_norm.bias": "replicated",
        "q_proj.weight": "rows",
        "q_proj.bias": "rows",
        "k_proj.weight": "rows",
        "k_proj.bias": "rows",
        "v_proj.weight": "rows",
        "v_proj.bias": "rows",
        "o_proj.weight": "columns",
        "o_proj.bias": "replicated",
        "post_norm.weight": "replicated",
        "post_norm.bias": "replicated",
        "up_proj.weight": "rows",
        "up_proj.bias": "rows",
        "down_proj.weight": "columns",
        "down_proj.bias": "replicated",
    }


def test_bloom_mpt_and_opt_differ_from_gpt2() -> None:
    bloom = model(norm="layernorm", positions="alibi", embedding_norm=True)
    assert names(bloom, "embedding") == [
        "embed_tokens.weight",
        "embed_norm.weight",
        "embed_norm.bias",
    ]
    mpt = model(norm="layernorm", norm_bias=False, positions="alibi")
    assert names(mpt, "embedding") == ["embed_tokens.weight"]
    assert names(mpt, "block")[:2] == ["input_norm.weight", "q_proj.weight"]
    opt = model(positions="learned", position_offset=2, mlp="relu")
    positions = opt.kinds()["embedding"][1]
    assert positions.shape == (34, 64)
    assert "gate_proj.weight" not in names(opt, "block")


@given(
    st.booleans(),
    st.booleans(),
    st.sampled_from(["rmsnorm", "layernorm"]),
    st.sampled_from(["swiglu", "gelu", "relu"]),
)
def test_decay_is_for_matrices_only(bias: bool, qk: bool, norm: str, mlp: str) -> None:
    spec = model(qkv_bias=bias, mlp_bias=bias, qk_norm=qk, norm=norm, mlp=mlp)
    for parameters in spec.kinds().values():
        for parameter in parameters:
            assert parameter.decay == (len(parameter.shape) == 2)
        assert len({parameter.name for parameter in parameters}) == len(parameters)
    assert spec.parameter_count == sum(
        parameter.count for kind in spec.layer_sequence() for parameter in spec.kinds()[kind]
    )


_EIGHT = {"experts": 8, "experts_per_token": 2}
_IN_TURNS: dict[str, object] = {"expert_pattern": ["1 dense", "1 routed"], "dense_ffn": 96}


def test_shared_experts_and_dense_blocks() -> None:
    beside = {"shared_ffn": 32, "shared_gate": True, "dense_blocks": 1, "dense_ffn": 96}
    spec = model(**_EIGHT, **beside, routing={"bias": True})
    assert spec.layer_sequence() == ("embedding", "dense", "block", "head")
    assert names(spec, "dense") == names(model(), "block")
    assert names(spec, "block")[6:12] == [
        *(f"shared.{name}_proj.weight" for name in ("gate", "up")),
        *("shared_gate.weight", "shared.down_proj.weight", "router.weight", "router.bias"),
    ]
    dense, one = model().parameter_count, 3 * 64 * 128
    shared = 3 * 64 * 32 + 64
    routed = 8 * one + shared + 8 * 64 + 8  # a bias has a value for each expert
    assert spec.parameter_count == dense - 2 * one + 3 * 64 * 96 + routed
    assert spec.active_parameter_count == spec.parameter_count - 6 * one
    assert spec.seen_by("dense").parameter_count == model(ffn=96).parameter_count


def test_experts() -> None:
    spec = model(experts=8, experts_per_token=2)
    assert names(spec, "block")[5:] == [
        "post_norm.weight",
        "router.weight",
        "experts.gate_proj.weight",
        "experts.up_proj.weight",
        "experts.down_proj.weight",
    ]
    dense, one = model().parameter_count, 3 * 64 * 128
    routers = 2 * 8 * 64
    assert spec.parameter_count == dense + 2 * 7 * one + routers
    assert spec.active_parameter_count == dense + 2 * 1 * one + routers
    assert model().active_parameter_count == dense


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 2}, "`experts_per_token` 2 without `experts`; state `experts`, or"),
        ({"router_loss": 0.01}, "`router_loss` 0.01 without `experts`"),
        ({"experts": 8}, "`experts_per_token` is 0, which must be from 1 to `experts` 8"),
        ({"experts": 8, "experts_per_token": 9}, "is 9, which must be from 1 to `experts` 8"),
        (
            _EIGHT | {"mlp": "gelu", "parallel_residual": True},
            "`experts` 8 with `mlp: gelu` and `parallel_residual`, but experts are swiglu MLPs, c",
        ),
        (
            {"experts": 8, "experts_per_token": 2, "parallel_residual": True},
            "`experts` 8 with `parallel_residual`, but",
        ),
        ({"shared_ffn": 64}, "`shared_ffn` 64 without `experts`; state `experts`, or remove it"),
        ({"dense_blocks": 1, "dense_ffn": 64}, "`dense_blocks` 1 and `dense_ffn` 64 without `exp"),
        ({"routing": {"bias": True}}, "`routing` without `experts`"),
        (_EIGHT | {"shared_gate": True}, "`shared_gate` without `shared_ffn`, the MLP that it"),
        (_EIGHT | {"dense_blocks": 1}, "`dense_blocks` is 1 and `dense_ffn` 0, the inner width"),
        (_EIGHT | {"dense_blocks": 2, "dense_ffn": 64}, "`dense_blocks` 2 of `layers` 2 leaves no"),
        (
            _EIGHT | {"router_loss": 0.1, "routing": {"scores": "sigmoid"}},
            "`router_loss` 0.1 balances a softmax, but `routing.scores` is sigmoid; remove it",
        ),
        ({"expert_norms": "after"}, "`expert_norms` without `experts`; state `experts`"),
        (
            _EIGHT | {"expert_norms": "after", "norms": "around"},
            "`expert_norms: after` with `norms: around`, by which one stands behind experts",
        ),
        (
            _EIGHT | {"expert_norms": "each", "norms": "around"},
            "`expert_norms: each` with `norms: around` and `shared_ffn` 0, but it is of experts",
        ),
        (
            _EIGHT | {"expert_norms": "after", "residual_scale": 0.5},
            "`expert_norms` after with `residual_scale` of experts, whose norms stand before",
        ),
        (
            _EIGHT | {"routing": {"scores": "sparsemixer"}},
            "`routing.scores` is sparsemixer with `router_normalised`, but each of its weights",
        ),
        (
            _EIGHT | {"routing": {"scores": "sparsemixer", "bias": True}},
            "`routing.scores` is sparsemixer with `routing.bias`, but it chooses the largest",
        ),
        (
            _EIGHT | {"routing": {"bias_of": "scores"}},
            "`routing.bias_of` is scores without `routing.bias`",
        ),
        (
            _EIGHT | {"mlp": "geglu", "mlp_bias": True},
            "`experts` 8 with `mlp: geglu` and `mlp_bias`, which swiglu experts have",
        ),
        (_EIGHT | {"mlp_bias": True, "shared_ffn": 8}, "`mlp_bias` of experts with `shared_ffn`"),
        (
            _EIGHT | {"mlp": "clamped_swiglu", "dense_blocks": 1, "dense_ffn": 8},
            "`mlp: clamped_swiglu` of experts with `dense_blocks`, whose MLPs have neither",
        ),
        ({"mlp": "clamped_swiglu"}, "`mlp: clamped_swiglu` without `experts`"),
        ({"expert_latent": 16}, "`expert_latent` 16 without `experts`; state `experts`"),
        (
            _EIGHT | {"expert_latent": 16, "mlp_bias": True},
            "`expert_latent` 16 with `mlp_bias`, but experts of a latent have no biases",
        ),
        (
            _EIGHT | {"mlp_bias": True, "routing": {"weighs": "inputs"}},
            "`routing.weighs: inputs` with `mlp_bias`, but the experts whose inputs are weighed",
        ),
        ({"expert_pattern": ["1 dense", "1 routed"]}, "`expert_pattern` without `experts`"),
        (
            _EIGHT | {"expert_pattern": ["1 routed"], "dense_ffn": 8},
            "`expert_pattern` 1 routed makes all blocks alike; remove it",
        ),
        (
            _EIGHT | _IN_TURNS | {"dense_blocks": 1},
            "`expert_pattern` 1 dense, 1 routed with `dense_blocks`, which says too what blocks",
        ),
        (
            _EIGHT | _IN_TURNS | {"dense_ffn": 0},
            "`expert_pattern` 1 dense, 1 routed without `dense_ffn`, the inner width",
        ),
        (_EIGHT | {"routing": {"groups": 3}}, "`routing.groups` 3 must divide `experts` 8 into"),
        (_EIGHT | {"routing": {"groups": 8}}, "into groups of two or more, the two best of which"),
        (
            _EIGHT | {"routing": {"groups": 2, "groups_per_token": 3}},
            "`routing.groups_per_token` 3 of 2 groups of 4 experts must hold `experts_per_token` 2",
        ),
    ],
)
def test_experts_that_make_no_sense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        model(**changes)
    assert message in str(caught.value)


def test_experts_in_every_second_block() -> None:
    spec = model(layers=5, **_EIGHT, **_IN_TURNS)
    assert spec.layer_sequence()[1:-1] == ("dense", "block", "dense", "block", "dense")
    assert (spec.routed_blocks, spec.seen_by("dense").ffn) == (2, 96)
    assert not spec.seen_by("block").expert_pattern


def test_blocks_alone_may_be_an_mlp_or_experts() -> None:
    """What a pattern of experts says of a mixer alone is nothing."""
    mixers = {"mixer_pattern": ["1 attention", "2 mlp"], "mlp": "relu2", "dense_ffn": 96}
    spec = model(layers=6, **_EIGHT, **mixers, expert_pattern=["2 dense", "1 routed"])
    assert spec.layer_sequence()[1:-1] == ("block", "dense_mlp", "mlp") * 2
    assert (spec.seen_by("dense_mlp").ffn, spec.seen_by("dense_mlp").experts) == (96, 0)
    assert (spec.seen_by("mlp").experts, spec.seen_by("block").has_mlp) == (8, False)
    with pytest.raises(InputError, match="makes all blocks alike"):
        model(layers=6, **_EIGHT, **mixers, expert_pattern=["1 routed", "2 dense"])


def test_experts_of_a_latent_are_as_wide_as_it_is() -> None:
    """Two matrices more lead to it and back; routers and shared experts read the stream."""
    spec = model(**_EIGHT, shared_ffn=32, expert_latent=16)
    shapes = {p.name: p.shape for p in spec.kinds()["block"]}
    assert shapes["latent_down_proj.weight"] == (16, spec.hidden)
    assert shapes["latent_up_proj.weight"] == (spec.hidden, 16)
    assert shapes["experts.up_proj.weight"] == (8 * spec.ffn, 16)
    assert shapes["experts.down_proj.weight"] == (8 * spec.ffn, 16)
    assert shapes["router.weight"] == (8, spec.hidden)
    assert shapes["shared.up_proj.weight"] == (32, spec.hidden)


def test_layer_sequence() -> None:
    assert model(layers=3).layer_sequence() == ("embedding", "block", "block", "block", "head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "`heads` 4 is not a multiple of `kv_heads` 3"),
        ({"heads": 3}, "`hidden` 64 is not a multiple of `heads` 3; state `head_dim`"),
        ({"head_dim": 15}, "`head_dim` 15 times `rotary_fraction` 1 is 15 columns, but"),
        ({"rotary_fraction": 0.05}, "is 0 columns, but rope rotates pairs"),
        ({"position_offset": 2}, "`position_offset` 2 counts rows of a learned table, but `pos"),
        ({"rotary_fraction": 1.5}, "must be at most 1"),
        ({"num_experts": 8}, "unknown key 'num_experts'; did you mean 'experts'?"),
        ({"shared_experts": 1}, "unknown key 'shared_experts'; did you mean 'shared_ffn'"),
        ({"shared_norm": True}, "`shared_norm` without `parallel_residual`: MLPs that come after"),
        ({"gate_of_heads": True}, "`gate_of_heads` without `attention_gate`"),
        ({"attention_sinks": True, "score_cap": 5.0}, "`attention_sinks` with `score_cap`, whose"),
        ({"keys_as_values": True}, "`keys_as_values` without `value_norm`, by which values differ"),
        (
            {"value_norm": True, "qk_norm": True, "qk_norm_whole": True},
            "`value_norm` with `qk_norm_whole`, which blocks with it do not have",
        ),
        (
            {"value_norm": True, "norm": "layernorm"},
            "`value_norm` with `norm: layernorm`, but it is",
        ),
        (
            {"block_scale": True, "parallel_residual": True},
            "`block_scale` with `parallel_residual`",
        ),
        (
            {"global_heads": {"head_dim": 16, "kv_heads": 1}},
            "`global_heads` without local and global blocks among the",
        ),
        ({"weightless_norms": "heads"}, "`weightless_norms: heads` without `qk_norm`, the norms"),
        (
            {"weightless_norms": "all", "norm_plus_one": True},
            "`weightless_norms: all` with `norm_plus_one`, whose norms have weights",
        ),
        (
            {"weightless_norms": "all", "norm": "layernorm"},
            "`weightless_norms: all` with `norm_bias`, whose norms have weights",
        ),
        (
            {"attention_chunk": 8, "sliding_window": 4},
            "`attention_chunk` 8 with `sliding_window`, but attention within chunks is of plain",
        ),
        (
            {"global_query_growth": {"length": 8}},
            "`global_query_growth` is of global blocks in which rope turns nothing",
        ),
        (
            {"attention_sinks": True, "positions": "alibi"},
            "`attention_sinks` with `positions: alibi`, whose kernels take no sinks; remove one",
        ),
        (
            {"rope_scaling": {"name": "linear", "factor": 2.0, "attention_factor": 1.1}},
            "`attention_factor` is of yarn and longrope, `rounded` of yarn, and `name` is linear",
        ),
        ({"qk_norm_turned": True}, "`qk_norm_turned` is of `qk_norm` of each head"),
        ({"qk_norm_whole": True}, "`qk_norm_whole` without `qk_norm`; state it"),
        ({"head_bias": True, "tied_embeddings": True}, "`head_bias` with `tied_embeddings`, which"),
        ({"norms": "after", "parallel_residual": True}, "`norms` after with `parallel_residual`"),
        (
            {"residual_scale": 0.5, "parallel_residual": True},
            "`residual_scale` 0.5 with `parallel_residual`, whose results are added as they are",
        ),
        ({"layers": 0}, "`layers` is 0, which must be greater than 0"),
        ({"norm": "batchnorm"}, "must be one of rmsnorm, layernorm"),
    ],
)
def test_rules_across_fields(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        model(**changes)
    assert message in str(caught.value)


def test_a_rule_across_fields_names_the_file_and_its_first_key_s_line() -> None:
    text = "\n".join(f"{key}: {value}" for key, value in (_BASE | {"heads": 3}).items())
    with pytest.raises(InputError) as caught:
        parse_document(text, ModelSpec, "m.yaml")
    line = [*_BASE].index("hidden") + 1
    assert line > 1
    assert str(caught.value).startswith(f"m.yaml:{line}: `hidden` 64")


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert model(heads=3, head_dim=32).attention_width == 96
