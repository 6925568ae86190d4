"""Plans for tiny models that execute in milliseconds: random ones, and the parts to make others."""

from __future__ import annotations

from hypothesis import strategies as st

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement
from bigplan.plan import Plan, Predicted, SearchRecord, StepParts
from bigplan.spec.catalog import find_cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, ParameterGroup
from bigplan.spec.schedule import Schedule
from bigplan.spec.step import Parameter
from bigplan.spec.training import LossScale, Training
from tests.runtime.reference import INACTIVE
from tests.toys import placements

LENGTH = 16
CHUNK = 400_000  # bytes: any layer here is one chunk (the default would reserve 768 MB for staging)
SHORT = 10_000  # bytes of a chunk, of which a layer has up to a dozen
# A rate that moves weights visibly, and a constant that keeps tiny gradients from mattering most.
OPTIMIZER = Optimizer(learning_rate=1e-2, epsilon=1e-6)
PREDICTED = Predicted(
    step_seconds=1.0,
    step_seconds_low=1.0,
    step_seconds_high=1.0,
    step_seconds_overlapped=1.0,
    step_seconds_serial=1.0,
    tokens_per_second=1.0,
    mfu=0.1,
    lower_bound_seconds=1.0,
    model_gap=0.0,
    simulated_gap=0.0,
    bottleneck="test",
    critical_path={"test": 1.0},
    busy_seconds={},
    op_seconds={},
    moved_bytes={},
    parts=StepParts(
        compute=1.0,
        recompute=0.0,
        collectives=0.0,
        update=0.0,
        bubble=0.0,
        waiting=0.0,
        waits_for="",
    ),
    memory=(),
)


def tiny_model(**changes: object) -> ModelSpec:
    """Byte tokens, two blocks of width 32, grouped heads. Every tensor is a multiple of 16 long.

    So torch's fused AdamW takes each through its vector body (bigplan/runtime/optimizer/fused.py).
    """
    fields = {
        "name": "tiny",
        "layers": 2,
        "hidden": 32,
        "ffn": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 256,
        "max_sequence_length": 64,
        "source": "test",
    }
    return ModelSpec.model_validate(fields | changes)


def shape_on(parameter: Parameter, ranks: int) -> tuple[int, ...]:
    """Its shape for layers, on one of so many tensor-parallel ranks."""
    rows, columns = parameter.local(ranks)
    if parameter.experts:  # whose rows take turns
        each = parameter.shape[-1]
        return rows * columns // each, each
    return (rows, columns)[-len(parameter.shape) :]


def elements_of(model: ModelSpec) -> int:
    """Elements of all layers; a constant has several for each of its values."""
    return sum(p.count for kind in model.layer_sequence() for p in model.kinds()[kind])


def tiny_training(global_batch: int, **changes: object) -> Training:
    """fp32 without clipping, unless changed."""
    fields = {
        "sequence_length": LENGTH,
        "global_batch": global_batch,
        "precision": "fp32",
        "clip_norm": None,
        "optimizer": OPTIMIZER,
    }
    return Training.model_validate(fields | changes)


def plan_of(
    model: ModelSpec,
    training: Training,
    strategy: Strategy,
    placement: Placement,
    device: str = "cpu",
) -> Plan:
    """A plan for `strategy.ranks` devices of one machine; nothing is predicted."""
    cluster = find_cluster("h200-1x")
    gpu = cluster.group.gpu.model_copy(update={"device": device})
    group = cluster.group.model_copy(update={"gpu": gpu, "gpus_per_node": strategy.ranks})
    return Plan(
        inputs={},
        predicted=PREDICTED,
        strategy=strategy,
        placement=placement,
        executable={},
        search=SearchRecord(solver="", strategies=1, relaxations=0, programs=0),
        alternatives=(),
        model=model,
        training=training,
        cluster=cluster.model_copy(update={"node_groups": (group,)}),
    )


def placed(slots: int = 2, chunk: int = CHUNK, **kinds: KindPlacement) -> Placement:
    """One stage of these kinds."""
    return Placement(stages=(StagePlacement(kinds=kinds),), slots=slots, chunk=chunk)


_NORMS_OF_HEADS: tuple[dict[str, object], ...] = (
    {"qk_norm": False},
    {"qk_norm": True},
    {"qk_norm": True, "qk_norm_whole": True},
    {"qk_norm": True, "qk_norm_turned": True},
)
# Those of a model without other weights, or of heads alone.
_WEIGHTLESS: tuple[dict[str, object], ...] = (
    {"weightless_norms": "all", "norm_bias": False},
    {"weightless_norms": "heads"},
)
# As many heads as a tensor is to be long.
_SINKS: dict[str, object] = {"attention_sinks": True, "heads": 16, "head_dim": 8}
_CHUNKS: dict[str, object] = {"attention_chunk": LENGTH // 4, "sliding_window": None}
_RESIDUALS: tuple[dict[str, object], ...] = (
    {"parallel_residual": False},
    {"parallel_residual": True},
    {"parallel_residual": True, "shared_norm": True},
)


@st.composite
def models(draw: st.DrawFn, kv_heads: tuple[int, ...] = (2, 4)) -> ModelSpec:
    """Tied or not, heads grouped or not, with or without biases and norms of queries and keys.

    One in four has Llama's blocks, one experts, one layer norms and a plain MLP, one any mixture.
    """
    flag = st.booleans()
    style: dict[str, object] = {"mlp_bias": draw(flag)}
    kind = draw(st.integers(-1, 2))
    if kind < 0:
        style = {
            "ffn": 32,
            # Biases of six would leave what follows them where a CPU's products have other bits.
            "experts": draw(st.sampled_from((4, 8))),
            "experts_per_token": draw(st.sampled_from((1, 2, 3))),
            "router_normalised": draw(flag),
            "router_loss": draw(st.sampled_from((0.0, 0.1))),
        } | draw(beside_experts() | of_gpt_oss())
    if kind > 0:
        style |= {
            "norm": "layernorm",
            "norm_bias": draw(flag),
            "norm_plus_one": draw(flag),
            "mlp": draw(st.sampled_from(("gelu", "gelu_tanh", "relu", "relu2"))),
            "positions": "learned",
            "position_offset": draw(st.sampled_from((0, 2))),
            "attention_output_bias": draw(flag),
        }
    if kind > 1:
        positions = draw(st.sampled_from(("rope", "learned", "alibi", "none")))
        style |= {
            "norm": draw(st.sampled_from(("rmsnorm", "layernorm"))),
            "mlp": draw(st.sampled_from(("swiglu", "gelu"))),
            "positions": positions,
            "position_offset": 0,
            "rotary_fraction": draw(st.sampled_from((0.25, 0.5, 1.0))),
            "embedding_norm": draw(flag),
        } | draw(st.sampled_from(_RESIDUALS))
    if kind == 0 and draw(flag):
        style = _of_gemma(draw)
    latent = kind < 1 and not style.keys() & {"norm_plus_one", "attention_sinks"} and draw(flag)
    if latent:
        style |= _latent(draw)
    style.setdefault("sliding_window", draw(st.sampled_from((None, None, 1, 5, LENGTH))))
    if not latent and _convolves(style) and draw(flag):
        dense = bool({"dense_blocks", "expert_pattern"} & {*style})
        mixers = of_lfm2(dense=dense) | of_qwen3_next(dense=dense) | of_granite4(dense=dense)
        mixers |= of_falcon_h1(style)
        if not dense and style.get("positions", "rope") == "rope":
            mixers |= of_lfm3() | of_lara_mini()
        style |= draw(mixers | of_nemotron_h(style) if _stand_alone(style) else mixers)
        if "expert_pattern" in style and "mixer_pattern" in style:  # attention beside experts
            style["expert_pattern"] = ("1 dense", "1 routed")
    several = {"attention_pattern", "dense_blocks", "expert_pattern", "mixer_pattern"} & {*style}
    least = 3 if style.get("mixer_pattern") in (_ALONE, _BOTH) else 2 if several else 1
    tied = draw(flag)
    turned = style.get("positions", "rope") == "rope"
    norms = _NORMS_OF_HEADS if turned else _NORMS_OF_HEADS[:3]
    if style.get("value_norm"):  # of each head alone, as the others are then
        norms = norms[:2] + norms[3:]
    normed = draw(st.sampled_from(norms[:1] if latent else norms))
    if _may_lack_weights(style, normed, latent=latent) and draw(flag):
        normed = normed | draw(st.sampled_from(_WEIGHTLESS[: 1 + bool(normed["qk_norm"])]))
    return tiny_model(
        layers=draw(st.integers(least, 3)),
        kv_heads=4 if latent else draw(st.sampled_from(kv_heads)),
        **draw(st.sampled_from(_GATES[:1] if latent else _GATES)),
        tied_embeddings=tied,
        head_bias=not tied and draw(flag),
        qkv_bias=not latent and draw(flag),
        **(style | normed),
    )


_GATES: tuple[dict[str, bool], ...] = (
    {},
    {"attention_gate": True},
    {"attention_gate": True, "gate_of_heads": True},
)


def _may_lack_weights(style: dict[str, object], normed: dict[str, object], *, latent: bool) -> bool:
    """Whether norms of a model like this may have no weights.

    Of what rope turns they would be in some blocks alone, of which a plan counts as many bytes.
    """
    some = "qk_norm_turned" in normed and not style.get("global_rope", True)
    whole = "qk_norm_whole" in normed or style.get("norm_plus_one")
    return not (latent or some or whole)


def _convolves(style: dict[str, object]) -> bool:
    """Whether some blocks of a model like this may have a convolution in place of attention."""
    usual = {"norms": "before", "parallel_residual": False}
    alike = all(style.get(key, value) == value for key, value in usual.items())
    parts = style.get("value_norm") or style.get("block_scale") or style.get("attention_pattern")
    return alike and not parts and style.get("positions") != "alibi"


def of_lfm2(*, dense: bool) -> st.SearchStrategy[dict[str, object]]:
    """A convolution in some blocks, or in all; `dense`: the first has no experts."""
    convolution = st.fixed_dictionaries({"taps": st.sampled_from((1, 3, 4)), "bias": st.booleans()})
    patterns = (), ("1 convolution", "1 attention"), ("1 attention", "2 convolution")
    return st.fixed_dictionaries(
        {"convolution": convolution, "mixer_pattern": st.sampled_from(patterns[: 3 - dense])}
    )


def of_lfm3() -> st.SearchStrategy[dict[str, object]]:
    """A convolution in some blocks, and windows or their own base of rope in some others."""
    bases = st.sampled_from(({"local_rope_theta": 50.0}, {"sliding_window": 5}))
    patterns = {
        "mixer_pattern": ("1 convolution", "2 attention"),
        "attention_pattern": ("2 local", "1 global"),
        "convolution": {"taps": 3},
    }
    norms = st.sampled_from(("before", "around"))
    return st.builds(lambda base, one: patterns | base | {"norms": one}, bases, norms)


def of_lara_mini() -> st.SearchStrategy[dict[str, object]]:
    """A delta rule, and rope in blocks with a window alone."""
    rule = {"key_heads": 4, "key_dim": 4, "value_heads": 16, "value_dim": 16, "taps": 3}
    patterns = {
        "mixer_pattern": ("1 delta_rule", "2 attention"),
        "attention_pattern": ("2 local", "1 global"),
        "sliding_window": 5,
        "global_rope": False,
    }
    return st.just(patterns | {"delta_rule": rule})


def of_qwen3_next(*, dense: bool) -> st.SearchStrategy[dict[str, object]]:
    """A gated delta rule, likewise. It has as many heads as a tensor is to be long."""
    rule = {"key_heads": 4, "key_dim": 4, "value_heads": 16, "value_dim": 16}
    rules = st.fixed_dictionaries(
        {name: st.just(size) for name, size in rule.items()}
        | {"taps": st.sampled_from((1, 3)), "rate_scale": st.sampled_from((1.0, 2.0))}
    )
    patterns = (), ("1 delta_rule", "1 attention"), ("1 attention", "2 delta_rule")
    return st.fixed_dictionaries(
        {"delta_rule": rules, "mixer_pattern": st.sampled_from(patterns[: 3 - dense])}
    )


def of_granite4(*, dense: bool) -> st.SearchStrategy[dict[str, object]]:
    """A state space, likewise, whose ranks divide groups or all have the only one."""
    sizes = {"heads": 16, "head_dim": 4, "state": 16}
    spaces = st.fixed_dictionaries(
        {name: st.just(size) for name, size in sizes.items()}
        | {"groups": st.sampled_from((1, 4)), "taps": st.sampled_from((1, 3))}
        | {name: st.booleans() for name in ("convolution_bias", "bias")}
    )
    patterns = (), ("1 state_space", "1 attention"), ("1 attention", "2 state_space")
    return st.fixed_dictionaries(
        {"state_space": spaces, "mixer_pattern": st.sampled_from(patterns[: 3 - dense])}
    )


def of_falcon_h1(style: dict[str, object]) -> st.SearchStrategy[dict[str, object]]:
    """A state space with attention beside it; an MLP that is no mixture may have factors."""
    scales = st.fixed_dictionaries(
        {"attention_scale": st.sampled_from((1.0, 0.5)), "other_scale": st.sampled_from((1.0, 2.0))}
    )
    of_space = st.fixed_dictionaries(
        {"norm": st.booleans(), "scales": st.sampled_from(((), (0.5, 1.0, 2.0, 0.25, 1.5)))}
    )
    whole = st.builds(
        lambda space, own, beside: {
            "state_space": {**space["state_space"], **own},
            "attention_beside": beside,
        },
        of_granite4(dense=True).map(lambda one: one | {"mixer_pattern": ()}),
        of_space,
        scales,
    )
    if style.keys() & {"experts", "dense_blocks"} or style.get("mlp", "swiglu") != "swiglu":
        return whole
    factors = st.sampled_from(({}, {"gate_scale": 0.5}, {"gate_scale": 2.0, "mlp_scale": 0.5}))
    return st.builds(lambda one, more: one | more, whole, factors)


_ALONE = ("1 mlp", "1 attention", "1 state_space")
_BOTH = ("2 mlp", "1 attention")  # an MLP for all tokens, and experts


def of_nemotron_h(style: dict[str, object]) -> st.SearchStrategy[dict[str, object]]:
    """Blocks that are attention, a state space, or an MLP or experts alone; or all without these.

    As Nemotron-H and Mamba-2 have them.
    """
    spaces = of_granite4(dense=True)
    alone = spaces.map(lambda space: space | {"mixer_pattern": _ALONE})
    if "expert_pattern" in style:
        return st.just({"mixer_pattern": _BOTH})
    if "experts" in style:
        return alone
    without = of_granite4(dense=False).map(lambda space: space | {"ffn": 0})
    return alone | without | st.just({"mixer_pattern": _ALONE[:2]})


def _stand_alone(style: dict[str, object]) -> bool:
    """Whether parts of a block of a model like this may be blocks alone."""
    usual = {"residual_scale": 1.0, "dense_blocks": 0}
    alike = all(style.get(key, value) == value for key, value in usual.items())
    return alike and style.get("mlp") != "clamped_swiglu"


def _latent(draw: st.DrawFn) -> dict[str, object]:
    """Latent attention, with one matrix of queries or two."""
    growing = {"name": "yarn", "factor": 2.0, "original_length": 3, "query_growth": 0.5}
    return {
        "sliding_window": None,
        "rope_scaling": draw(st.sampled_from((None, growing))),
        "latent_attention": {
            "query_rank": draw(st.sampled_from((None, 16))),
            "kv_rank": 16,
            "plain_dim": draw(st.sampled_from((8, 16))),
            "rope_dim": draw(st.sampled_from((4, 8))),
            "value_dim": draw(st.sampled_from((8, 12))),
            "interleaved": draw(st.booleans()),
        },
    }


@st.composite
def beside_experts(draw: st.DrawFn) -> dict[str, object]:
    """Parts of DeepSeek's, GLM-4.5's, Qwen2-MoE's and Nemotron 3's models, each or not."""
    style: dict[str, object] = {}
    if draw(st.booleans()):
        style |= {"shared_ffn": draw(st.sampled_from((16, 48))), "shared_gate": draw(st.booleans())}
    if not style.get("shared_gate"):
        style["residual_scale"] = draw(st.sampled_from((1.0, 0.3)))
        style["mlp"] = draw(st.sampled_from(("swiglu", "relu2", "geglu")))
    if style.get("residual_scale", 1) == 1:
        style["norms"] = draw(st.sampled_from(("before", "around", "after")))
        if style["norms"] == "before":
            style["expert_norms"] = draw(st.sampled_from(("as_others", "after")))
        elif style["norms"] == "around" and "shared_ffn" in style:
            style["expert_norms"] = draw(st.sampled_from(("as_others", "each")))
    if style.get("expert_norms") != "each" and draw(st.booleans()):
        style["expert_latent"] = draw(st.sampled_from((16, 32)))
    if style.get("expert_norms") == "each":
        pattern = {"attention_pattern": ("1 local", "1 global"), "sliding_window": 5}
        style |= {"norm_plus_one": draw(st.booleans())} | draw(st.sampled_from(({}, pattern)))
        style |= _of_gemma4(draw, style)
    elif draw(st.booleans()):
        style |= {"dense_blocks": 1, "dense_ffn": 64}
    elif draw(st.booleans()):
        patterns = ("1 dense", "1 routed"), ("1 routed", "1 dense")
        style |= {"expert_pattern": draw(st.sampled_from(patterns)), "dense_ffn": 64}
    return style | _routing(draw, style)


_BIASES: tuple[dict[str, object], ...] = (
    {"bias": False},
    {"bias": True},
    {"bias": True, "bias_of": "scores"},
)


def _routing(draw: st.DrawFn, style: dict[str, object]) -> dict[str, object]:
    """How routers of such a model choose, and what that takes."""
    routing: dict[str, object] = {
        "score_scale": draw(st.sampled_from((1.0, 0.3))),
        "expert_scales": draw(st.booleans()),
    }
    if style.get("mlp", "swiglu") == "swiglu":
        routing["weighs"] = draw(st.sampled_from(("outputs", "inputs")))
    found: dict[str, object] = {"routing": routing}
    if routing["expert_scales"]:  # of four, what follows would have other bits on a CPU
        found["experts"] = 16
    if draw(st.booleans()):
        return found | {
            "routing": routing | {"scores": "sparsemixer", "jitter": 0.2},
            "router_normalised": False,
        }
    if draw(st.booleans()):
        groups = {
            "scores": "sigmoid",
            **draw(st.sampled_from(_BIASES)),
            "groups": 2,
            "groups_per_token": draw(st.sampled_from((1, 2))),
            "scale": draw(st.sampled_from((1.0, 2.5))),
        }
        # A group of two or three experts may be all that a token chooses among.
        few = {"router_loss": 0.0, "experts_per_token": draw(st.sampled_from((1, 2)))}
        return found | few | {"routing": routing | groups}
    return found


@st.composite
def of_gpt_oss(draw: st.DrawFn) -> dict[str, object]:
    """Parts of GPT-OSS's models, each or not."""
    flag = st.booleans()
    return draw(st.sampled_from((_SINKS, {}))) | {
        "experts": 16,
        "mlp": draw(st.sampled_from(("clamped_swiglu", "swiglu"))),
        "mlp_bias": draw(flag),
        "routing": {"score_bias": draw(flag)},
        "attention_output_bias": draw(flag),
    }


def _of_gemma(draw: st.DrawFn) -> dict[str, object]:
    """Parts of Gemma's, OLMo's and Granite's models, each or not.

    Attention may differ between blocks.
    """
    style: dict[str, object] = {
        "mlp": draw(st.sampled_from(("geglu", "swiglu", "gelu_tanh"))),
        "norms": draw(st.sampled_from(("around", "before", "after"))),
        "residual_scale": draw(st.sampled_from((1.0, 0.3))),
        "logit_scale": draw(st.sampled_from((1.0, 2.5))),
        "norm_plus_one": draw(st.booleans()),
        "embedding_scale": draw(st.sampled_from((1.0, 3.0))),
        "score_scale": draw(st.sampled_from((None, 0.3))),
        **draw(st.sampled_from(({"score_cap": 0.8}, _SINKS, {}))),
        "logit_cap": draw(st.sampled_from((None, 0.8))),
    }
    if draw(st.booleans()):
        style |= {
            "attention_pattern": draw(
                st.sampled_from((("1 local", "1 global"), ("1 global", "2 local")))
            ),
            **draw(st.sampled_from(({"sliding_window": 5}, _CHUNKS))),
            "local_rope_theta": draw(st.sampled_from((None, 50.0))),
            "global_rope": draw(st.booleans()),
        }
        if not style["global_rope"] and draw(st.booleans()):
            style["global_query_growth"] = {"factor": 0.5, "length": 3}
    return style | _of_gemma4(draw, style)


def _of_gemma4(draw: st.DrawFn, style: dict[str, object]) -> dict[str, object]:
    """Parts of Gemma 4's models, each or not."""
    flag = st.booleans()
    more: dict[str, object] = {"block_scale": draw(flag)}
    if not style["norm_plus_one"]:
        more["value_norm"] = draw(flag)
        more["keys_as_values"] = more["value_norm"] and draw(flag)
    if "attention_pattern" in style and "global_query_growth" not in style and draw(flag):
        more["global_heads"] = {
            "head_dim": 16,
            "kv_heads": draw(st.sampled_from((2, 4))),
            "keys_as_values": more.get("value_norm", False) and draw(flag),
        }
    return more


@st.composite
def carrying(draw: st.DrawFn) -> ModelSpec:
    """Blocks that hand on keys and values, or have inputs of their own, or both (Gemma 4 E2B)."""
    flag = st.booleans()
    shares = draw(flag)
    style: dict[str, object] = {
        "mlp": "geglu",
        "norms": "around",
        "attention_pattern": ("1 local", "1 global"),
        "sliding_window": 5,
        "local_rope_theta": draw(st.sampled_from((None, 50.0))),
        "block_scale": draw(flag),
        "value_norm": draw(flag),
        "qk_norm": draw(flag),
        "qkv_bias": draw(flag),
        "tied_embeddings": draw(flag),
        "embedding_scale": draw(st.sampled_from((1.0, 3.0))),
        "logit_cap": draw(st.sampled_from((None, 0.8))),
    }
    if draw(flag):
        style["global_heads"] = {"head_dim": 16, "kv_heads": draw(st.sampled_from((2, 4)))}
    if shares:
        ffn = draw(st.sampled_from((64, 128)))
        style["key_sharing"] = {"blocks": draw(st.sampled_from((3, 1, 2))), "ffn": ffn}
    if not shares or draw(flag):
        style["block_inputs"] = {"width": 16}
    return tiny_model(layers=5, kv_heads=draw(st.sampled_from((2, 4))), **style)


@st.composite
def optimizers(draw: st.DrawFn) -> Optimizer:
    """AdamW, or SGD with a rate that moves weights as visibly; with or without groups."""
    groups = draw(
        st.lists(
            st.sampled_from(
                (
                    {"match": "layers.*.q_proj.*", "weight_decay": 0.0},
                    {"match": "*norm*", "weight_decay": 0.3, "learning_rate_factor": 0.5},
                    {"match": "layers.0.*", "learning_rate_factor": 0.0},
                )
            ),
            unique_by=lambda group: group["match"],
        )
    )
    if draw(st.booleans()):
        return OPTIMIZER.model_copy(update={"groups": _groups(groups)})
    momentum = draw(st.sampled_from((0.0, 0.9)))
    sgd = Optimizer(name="sgd", learning_rate=0.5, momentum=momentum, weight_decay=0.01)
    return sgd.model_copy(update={"groups": _groups(groups)})


def _groups(groups: list[dict[str, object]]) -> tuple[ParameterGroup, ...]:
    return tuple(ParameterGroup.model_validate(group) for group in groups)


def schedules() -> st.SearchStrategy[Schedule]:
    """Rates that differ in each of the first steps, and one that stays."""
    return st.sampled_from(
        (
            Schedule(),
            Schedule(warmup_steps=5),
            Schedule(name="cosine", warmup_steps=1, decay_steps=4, final_fraction=0.1),
            Schedule(name="linear", decay_steps=3),
        )
    )


def loss_scales() -> st.SearchStrategy[LossScale]:
    """For fp16: one that stays, one that grows, and one with which the first steps overflow."""
    return st.sampled_from(
        (
            LossScale(initial=1024),
            LossScale(initial=256, growth_interval=1),
            LossScale(initial=2**20),
        )
    )


@st.composite
def plans(
    draw: st.DrawFn,
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16"),
    device: str = "cpu",
    kv_heads: tuple[int, ...] = (2, 4),
    of: st.SearchStrategy[ModelSpec] | None = None,
) -> Plan:
    """Any plan of one process; `of` a model, by default one of `models`."""
    model = draw(models(kv_heads) if of is None else of)
    strategy = Strategy(
        dp=1,
        micro_batch=draw(st.integers(1, 2)),
        accumulation_group=draw(st.integers(1, 3)),
    )
    units = draw(st.integers(1, 3))
    precision = draw(st.sampled_from(precisions))
    narrow = precision != "fp32" and draw(st.booleans())
    training = tiny_training(
        strategy.micro_batch * strategy.accumulation_group * units,
        precision=precision,
        gradient_precision=precision if narrow else "fp32",
        clip_norm=draw(st.sampled_from((None, INACTIVE, 0.5))),
        optimizer=draw(optimizers()),
        schedule=draw(schedules()),
        # Whether a sum in fp16 overflows may depend on its order.
        loss_scale=LossScale(initial=1024) if narrow else draw(loss_scales()),
        seed=draw(st.integers(0, 3)),
    )
    graph = build_graph(model, training, strategy)
    placement = draw(placements(graph, free=True))
    chunk = draw(st.sampled_from((SHORT, 30_000, CHUNK)))
    placement = placement.model_copy(update={"chunk": chunk})
    return plan_of(model, training, strategy, placement, device)
