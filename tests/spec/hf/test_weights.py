"""Every parameter has its place in a Hugging Face file, and every such tensor its parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigplan.spec import state_space_steps as space
from bigplan.spec.carried import TABLES
from bigplan.spec.catalog import find_model
from bigplan.spec.delta_rule_steps import DECAY_OFFSET, LOG_DECAY
from bigplan.spec.expert_steps import EXPERT_SCALES, ROUTER_BIAS
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.weights import Stored, hf_tensors, stored
from bigplan.spec.layers import BLOCK_SCALE, NARROWING, SINKS, WIDENING
from bigplan.spec.model import ModelSpec
from bigplan.spec.xielu import FIRST


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama-3-8b", "llama"),
        ("qwen2.5-7b", "qwen2"),
        ("gpt2-xl", "gpt2"),
        ("opt-13b", "opt"),
        ("bloom-176b", "bloom"),
        ("phi-3-mini", "phi3"),
        ("stablelm-2-1.6b", "stablelm"),
        ("falcon-40b", "falcon"),
        ("starcoder2-7b", "starcoder2"),
        ("lfm2-1.2b", "lfm2"),
        ("granite-4.0-h-micro", "granitemoehybrid"),
        ("falcon-h1-7b", "falcon_h1"),
        ("nemotron-nano-9b-v2", "nemotron_h"),
    ],
)
def test_tensors_hold_every_parameter_once(name: str, family: str) -> None:
    model = find_model(name)
    tensors = hf_tensors(family, model)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    pieces = [(p.layer, p.parameter.name) for tensor in tensors for p in tensor.pieces]
    expected = [
        (layer, parameter.name)
        for layer, kind in enumerate(model.layer_sequence())
        for parameter in model.kinds()[kind]
    ]
    assert sorted(pieces) == sorted(expected)
    total = sum(p.parameter.count for tensor in tensors for p in tensor.pieces)
    assert total == model.parameter_count


LATENT = {"kv_rank": 8, "plain_dim": 8, "rope_dim": 8, "value_dim": 8}


def _with_latents(model: dict[str, object]) -> Iterator[ModelSpec]:
    """The model with latent attention of either kind."""
    others = {
        key: value
        for key, value in model.items()
        if key not in ("kv_heads", "head_dim", "qk_norm", "positions")
    }
    for rank in (None, 8):
        yield ModelSpec.model_validate(others | {"latent_attention": LATENT | {"query_rank": rank}})


def _modules(*, experts: bool = False, **changes: object) -> set[str]:
    """With tensors of their own, in a model that has all but what `changes` say."""
    all_of_it = {
        "qk_norm": True,
        "positions": "learned",
        "embedding_norm": True,
        "tied_embeddings": False,
        "experts": 2 if experts else 0,
        "experts_per_token": 1 if experts else 0,
        "shared_ffn": 8 * experts,
    }
    model = ModelSpec.model_validate(find_model("llama-3-8b").model_dump() | all_of_it | changes)
    kinds = [*model.kinds().values()]
    if changes.get("qk_norm", True):
        around = model.model_dump() | {"norms": "around"}
        kinds += ModelSpec.model_validate(around).kinds().values()
    if changes.get("qk_norm", True):
        kinds += [
            kind for one in _with_latents(model.model_dump()) for kind in one.kinds().values()
        ]
    if changes.get("qk_norm", True):
        mixed = {
            "convolution": {"bias": True},
            "delta_rule": {"key_heads": 1, "value_heads": 1},
            "state_space": {"heads": 1},
            "mixer_pattern": ("1 convolution", "1 delta_rule", "1 state_space", "1 attention"),
            "attention_gate": True,
        }
        kinds += ModelSpec.model_validate(model.model_dump() | mixed).kinds().values()
        alone = {"convolution": {}, "mixer_pattern": ("1 convolution", "1 attention")}
        kinds += ModelSpec.model_validate(around | alone).kinds().values()
        kinds += find_model("gemma-4-e2b").kinds().values()
    named = {p.name.rpartition(".")[0] for parameters in kinds for p in parameters}
    if changes.get("qk_norm", True):
        named |= {LOG_DECAY, DECAY_OFFSET, BLOCK_SCALE, SINKS, *FIRST}
        named |= {space.LOG_DECAY, space.STEP_OFFSET, space.SKIP, TABLES}
    if experts and "mlp" not in changes:  # a family may name modules that only some models have
        others = {"shared_gate": True, "dense_blocks": 1, "dense_ffn": 8}
        beside = ModelSpec.model_validate(model.model_dump() | others | {"routing": {"bias": True}})
        each = {"norms": "around", "expert_norms": "each", "routing": {"expert_scales": True}}
        gemma = ModelSpec.model_validate(model.model_dump() | each)
        names = [p.name for one in (beside, gemma) for kind in one.kinds().values() for p in kind]
        named |= {
            EXPERT_SCALES,
            *(NARROWING, WIDENING),
            "router_norm.weight",
            *(name.rpartition(".")[0] for name in names),
            ROUTER_BIAS,
        }
        own = {"attention_sinks": True, "mlp_bias": True, "routing": {"score_bias": True}}
        biased = ModelSpec.model_validate(model.model_dump() | own | {"shared_ffn": 0})
        names = [p.name for kind in biased.kinds().values() for p in kind]
        named |= {*names, *(name.rpartition(".")[0] for name in names)}
    return named


@pytest.mark.parametrize("family", FAMILIES)
def test_families_name_modules_that_there_are(family: str) -> None:
    tensors = FAMILIES[family].tensors
    experts = "router" in tensors.names
    assert set(tensors.names) <= _modules(experts=experts)
    # Whatever a family leaves out, every model has these, or of Mamba-2 those of a state space.
    alone: dict[str, object] = {"ffn": 0, "state_space": {"heads": 1}, "positions": "none"}
    usual: dict[str, object] = {"positions": "alibi"}
    least = _modules(
        qk_norm=False,
        embedding_norm=False,
        mlp="relu2" if family == "nemotron_h" else "swiglu" if experts else "gelu",
        experts=experts,
        shared_ffn=0,
        **(alone if family == "mamba2" else usual),
    )
    # A module is known by its own name, or by those of its parameters.
    known = {*tensors.names, *(name.rpartition(".")[0] for name in tensors.names)}
    # Norms before attention and MLP are not there in some families, or one is there for both.
    assert least - {"input_norm", "post_norm"} <= known
    fused = {module for group in tensors.fused for module in group}
    assert {*tensors.transposed, *fused, *tensors.in_turns} <= known


def _places(family: str, model: ModelSpec, layer: int) -> dict[str, Stored]:
    kind = model.layer_sequence()[layer]
    places = {p.name: stored(family, model, layer, p) for p in model.kinds()[kind]}
    return {name: place for name, (place, *_) in places.items()}


@pytest.mark.parametrize(
    ("family", "name", "down"),
    [
        ("mixtral", "mixtral-8x7b", "block_sparse_moe.experts.{}.w2"),
        ("qwen3_moe", "qwen3-30b-a3b", "mlp.experts.{}.down_proj"),
        ("qwen2_moe", "qwen1.5-moe-a2.7b", "mlp.experts.{}.down_proj"),
        ("glm4_moe", "glm-4.5-air", "mlp.experts.{}.down_proj"),
    ],
)
def test_every_expert_has_tensors_of_its_own(family: str, name: str, down: str) -> None:
    """Its rows take turns with others' in ours, and of a last matrix its columns do."""
    model = find_model(name)
    parameters = {p.name: p for p in model.kinds()["block"]}
    places = stored(family, model, 3, parameters["experts.down_proj.weight"])
    assert [place.expert for place in places] == list(range(model.experts))
    assert all(place.transposed and place.run == model.ffn for place in places)
    assert places[-1].tensor == f"model.layers.2.{down.format(model.experts - 1)}.weight"
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(family, model)}
    assert shapes[places[-1].tensor] == (model.hidden, model.ffn)
    (up, *_) = stored(family, model, 3, parameters["experts.up_proj.weight"])
    assert shapes[up.tensor] == (model.ffn, model.hidden)
    assert not up.transposed
    (router,) = stored(family, model, 3, parameters["router.weight"])
    assert shapes[router.tensor] == (model.experts, model.hidden)


def test_gpt2_keeps_queries_keys_and_values_in_one_transposed_matrix() -> None:
    model = find_model("gpt2-xl")
    places = _places("gpt2", model, 3)
    assert places["k_proj.weight"].tensor == "transformer.h.2.attn.c_attn.weight"
    assert [places[f"{name}_proj.bias"].before(7) for name in "qkv"] == [0, 1600, 3200]
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors("gpt2", model)}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (1600, 4800)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (4800,)
    assert shapes["transformer.h.47.mlp.c_proj.weight"] == (6400, 1600)
    assert shapes["transformer.wpe.weight"] == (1024, 1600)


def test_bloom_keeps_them_head_by_head() -> None:
    model = find_model("bloom-176b")  # heads of 128
    places = _places("bloom", model, 3)
    names = [f"{name}_proj.weight" for name in "qkv"]
    assert [places[name].before(127) for name in names] == [0, 128, 256]
    # Below them a head of each: two others' of the first, and of the second those before.
    assert [places[name].before(128) for name in names] == [256, 384, 512]
