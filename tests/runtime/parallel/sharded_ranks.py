"""Plans of ranks that share out state, layers or what is in them, and processes that run them."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Replicas, Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import LossScale, Training
from tests.runtime.execution.streamed import streamed_kind
from tests.runtime.harness import Run, evaluated, execute, steps_of, take_gpu
from tests.runtime.masked import masked_data, masked_training, prepare_masked
from tests.runtime.plans import (
    CHUNK,
    SHORT,
    loss_scales,
    models,
    optimizers,
    placed,
    plan_of,
    schedules,
    tiny_model,
    tiny_training,
)
from tests.runtime.processes import start
from tests.runtime.reference import INACTIVE
from tests.toys import kind_placement, placements

Drawn = TypeVar("Drawn")
MASKED = "masked"  # names of plans that validate, too, begin so
Ran = tuple[int, Path, dict[str, Plan]]  # ranks, a folder with what they computed, plans by name
# Of four ranks: two have all other cases. With ZeRO and masks four are in `unequal`, too.
OF_FOUR = "fp16-z1"
LONG = 3  # steps of
LONGER = ["same-everywhere-z1", "clipped-z2", "same-everywhere-z3", "tp2-everywhere"]
# Models that take one step, as parts of their names: what they have within a layer meets a second
# one as Llama's layers do.
PARTS = (
    *("gpt", "beside", "nemotron", "gemma", "falcon", "qwen3", "olmo", "isolated", "bloom"),
    *("mistral", "deepseek", "lfm3", "one-key"),
)
# Of ZeRO's first stages: `tied` is in bf16, `fp16` streams, `experts` clip, `everywhere` has a part
# of all state on the GPU, and masks are the losses' matter. Tied tables by stage 2: tied_pipelines.
ONCE = {
    1: ("same-resident", "same-bf16", "clipped", MASKED),
    2: ("same-resident", "same-bf16", "same-streamed", "tied", "experts", MASKED),
    3: (),
}


GEMMA: dict[str, object] = {
    "mlp": "geglu",
    "norms": "around",
    "norm_plus_one": True,
    "qk_norm": True,
    "embedding_scale": 2.0,
    "score_scale": 0.3,
    "score_cap": 0.8,
    "logit_cap": 1.5,
    "sliding_window": 5,
    "attention_pattern": ("1 local", "1 global"),
    "local_rope_theta": 50.0,
    "tied_embeddings": True,
}
LATENT = {
    "kv_heads": 4,
    "latent_attention": {
        "query_rank": 16,
        "kv_rank": 16,
        "plain_dim": 8,
        "rope_dim": 4,
        "value_dim": 8,
    },
}
OLMO_AND_GRANITE: dict[str, object] = {
    "mlp": "xielu",
    "norms": "after",
    "qk_norm": True,
    "qk_norm_whole": True,
    "embedding_scale": 3.0,
    "residual_scale": 0.6,
    "logit_scale": 2.0,
}
COHERE: dict[str, object] = {
    "norm": "layernorm",
    "norm_bias": False,
    "parallel_residual": True,
    "shared_norm": True,
    "logit_scale": 0.25,
    "sliding_window": 5,
    "attention_pattern": ("1 local", "1 global"),
    "global_rope": False,
}
GPT_OSS: dict[str, object] = {
    "ffn": 32,
    "experts": 16,
    "experts_per_token": 3,
    "routing": {"score_bias": True},
    "mlp": "clamped_swiglu",
    "mlp_bias": True,
    "qkv_bias": True,
    "attention_output_bias": True,
    "attention_sinks": True,
    "heads": 16,
    "head_dim": 8,
    "sliding_window": 5,
    "attention_pattern": ("1 local", "1 global"),
}
# Parts of families that Llama has not, in tied models.
FAMILIES = {
    name: parts | {"tied_embeddings": True}
    for name, parts in (
        *(("gemma", GEMMA), ("olmo", OLMO_AND_GRANITE), ("cohere", COHERE)),
        ("gpt-oss", GPT_OSS),
    )
}
# Whose embedding and head differ from Llama's; olmo's scales cohere has, too.
ENDS = ("gemma", "olmo")
EXPERTS = {"ffn": 32, "experts": 4, "experts_per_token": 2, "router_loss": 0.1}
BESIDE = EXPERTS | {
    "router_loss": 0.0,
    "shared_ffn": 48,
    "shared_gate": True,
    "dense_blocks": 1,
    "dense_ffn": 64,
    "routing": {"scores": "sigmoid", "bias": True, "groups": 2, "groups_per_token": 2},
}
DELTA_RULE: dict[str, object] = {
    "delta_rule": {"key_heads": 4, "value_heads": 16, "key_dim": 4, "value_dim": 16},
    "attention_gate": True,
}
QWEN3_NEXT = (
    EXPERTS
    | DELTA_RULE
    | {"mixer_pattern": ("2 delta_rule", "1 attention"), "shared_ffn": 48, "shared_gate": True}
)
STATE_SPACE: dict[str, object] = {
    "state_space": {"heads": 16, "head_dim": 4, "state": 16, "groups": 1, "bias": True},
    "residual_scale": 0.3,
    "positions": "none",
}
IN_GROUPS = {"state_space": {"heads": 16, "head_dim": 4, "state": 16, "groups": 4, "taps": 3}}
GRANITE_4 = STATE_SPACE | {"mixer_pattern": ("2 state_space", "1 attention")}
# Attention beside a state space, with factors: that of one group has no norm.
FALCON_H1: dict[str, object] = {
    "state_space": {"heads": 16, "head_dim": 4, "state": 16, "groups": 4}
    | {"scales": (0.5, 2.0, 0.75, 1.5, 0.25)},
    "attention_beside": {"attention_scale": 0.5, "other_scale": 2.0},
    "gate_scale": 0.7,
    "mlp_scale": 0.6,
}
BESIDE_UNNORMED = FALCON_H1 | {
    "state_space": {"heads": 16, "head_dim": 4, "state": 16, "norm": False}
}
# Blocks that are one thing alone, the last of them with experts.
MIXER_ALONE = IN_GROUPS | {"ffn": 0, "positions": "none"}
# Heads of two widths; ranks that split the only key head of global blocks have the same one.
GEMMA4: dict[str, object] = {
    "norms": "around",
    "mlp": "geglu",
    "qk_norm": True,
    "value_norm": True,
    "block_scale": True,
    "score_scale": 1.0,
    "sliding_window": 5,
    "attention_pattern": ("2 local", "1 global"),
    "local_rope_theta": 50.0,
    "rope_scaling": {"name": "proportional", "turned": 0.5},
    "global_heads": {"head_dim": 16, "kv_heads": 1, "keys_as_values": True},
}
# Blocks with inputs of their own, the last two with keys and values of the first two.
GEMMA4_E = GEMMA4 | {
    "attention_pattern": ("1 local", "1 global"),
    "global_heads": {"head_dim": 16, "kv_heads": 1},
    "key_sharing": {"blocks": 2, "ffn": 128},
    "block_inputs": {"width": 16},
}
MLP_ALONE: dict[str, object] = {"mixer_pattern": ("1 mlp",), "mlp": "relu2"}
EXPERTS_ALONE = MLP_ALONE | {
    "ffn": 32,
    "experts": 4,
    "experts_per_token": 2,
    "shared_ffn": 48,
    "routing": {"scores": "sigmoid", "bias": True, "scale": 2.5},
}
NEMOTRON_H = IN_GROUPS | MLP_ALONE | {"mixer_pattern": ("1 state_space", "1 mlp", "1 attention")}
NEMOTRON_3 = NEMOTRON_H | EXPERTS_ALONE | {"mixer_pattern": NEMOTRON_H["mixer_pattern"]}

OLMO_HYBRID: dict[str, object] = {
    "delta_rule": {"key_heads": 4, "value_heads": 16, "key_dim": 4, "value_dim": 16}
    | {"rate_scale": 2.0, "norm_epsilon": 1e-5, "norms_before": True},
    "mixer_pattern": ("2 delta_rule", "1 attention"),
    "norms": "after",
    "qk_norm": True,
    "qk_norm_whole": True,
    "global_rope": False,
}
LFM2: dict[str, object] = {
    "convolution": {"taps": 3},
    "mixer_pattern": ("2 convolution", "1 attention"),
}


def layouts(ranks: int) -> list[Strategy]:
    """The ways to split a step over so many ranks."""
    if ranks == 8:
        return splits(ranks)
    sharded = [Strategy(dp=ranks, zero=zero) for zero in (1, 2, 3)]
    pipelines = [Strategy(dp=1, pp=ranks), Strategy(dp=1, pp=2, vpp=ranks)][: 4 // ranks]
    if ranks > 2:
        both = [Strategy(dp=ranks // 2, pp=2, zero=zero) for zero in range(4)]
        uneven = Strategy(dp=1, pp=ranks, first_blocks=2)
        pipelines += [*both, uneven, Strategy(dp=ranks // 2, pp=2, vpp=2, zero=1)]
    return [*sharded, *pipelines, *splits(ranks)]


def splits(ranks: int) -> list[Strategy]:
    """Those of them with tensor parallelism."""
    if ranks == 2:
        return [Strategy(dp=1, tp=2), Strategy(dp=1, tp=2, sequence_parallel=False)]
    if ranks == 4:
        sharded = [Strategy(dp=2, tp=2, zero=zero) for zero in range(4)]
        pipelines = [Strategy(dp=1, tp=2, pp=2), Strategy(dp=1, tp=2, pp=2, vpp=2)]
        return [*sharded, *pipelines, Strategy(dp=1, tp=4)]
    return [Strategy(dp=2, tp=2, pp=2, zero=zero) for zero in (1, 3)]


def name_of(layout: Strategy) -> str:
    """What it has of what a strategy may have, in a few letters."""
    usual = Strategy(dp=1).model_dump()
    changed = {key: value for key, value in layout.model_dump().items() if value != usual.get(key)}
    return "-".join(f"{key}{value}" for key, value in changed.items())


@st.composite
def sharded_plans(
    draw: st.DrawFn,
    ranks: int,
    precisions: tuple[str, ...],
    device: str,
    ways: Sequence[Strategy] = (),
) -> Plan:
    """Any model, precision and placement, under any layout; `ways`: those, if not all."""
    model, layout = draw(models()), draw(st.sampled_from(ways or layouts(ranks)))
    chunks = layout.pp * layout.vpp
    if layout.pp > 1:
        more = layout.first_blocks or draw(st.integers(0, 1))
        model = model.model_copy(update={"layers": chunks + more})
    changes = {"micro_batch": draw(st.integers(1, 2))}
    if layout.vpp == 1:
        changes["accumulation_group"] = draw(st.integers(1, 2))
    strategy = layout.model_copy(update=changes)
    units = draw(st.integers(1, 3)) * (layout.pp if layout.vpp > 1 else 1)
    precision = draw(st.sampled_from(precisions))
    if model.experts and layout.tp > 1:
        precision = "fp32"  # a router's scores rounded otherwise may choose other experts
    if layout.cp > 1 and (model.delta_rule or model.state_space):  # whose state is whole
        none = {"delta_rule": None, "state_space": None, "mixer_pattern": ()}
        other = model.model_dump() | none
        model = ModelSpec.model_validate(other)
    if model.experts and layout.cp > 1:  # the plain loop balances experts over whole sequences
        model = model.model_copy(update={"router_loss": 0.0})
    narrow = precision != "fp32" and draw(st.booleans())
    training = tiny_training(
        strategy.dp * strategy.micro_batch * strategy.accumulation_group * units,
        precision=precision,
        gradient_precision=precision if narrow else "fp32",
        clip_norm=draw(st.sampled_from((None, INACTIVE, 0.5))),
        optimizer=draw(optimizers()),
        schedule=draw(schedules()),
        loss_scale=LossScale(initial=1024) if narrow else draw(loss_scales()),
        seed=draw(st.integers(0, 3)),
    )
    placement = draw(placements(build_graph(model, training, strategy), free=True))
    chunk = draw(st.sampled_from((SHORT, 30_000, CHUNK)))
    placement = placement.model_copy(update={"chunk": chunk})
    return plan_of(model, training, strategy, placement, device)


def random_plans(
    ranks: int,
    number: int,
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16"),
    device: str = "cpu",
) -> dict[str, Plan]:
    """So many of them, the same in every run."""
    found = drawn(sharded_plans(ranks, precisions, device), number)
    return {f"random-{'-'.join(precisions)}-{i}": plan for i, plan in enumerate(found)}


def drawn(plans: st.SearchStrategy[Drawn], number: int) -> list[Drawn]:
    """So many of them, the same in every run."""
    found: list[Drawn] = []

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plans)
    def collect(one: Drawn) -> None:
        found.append(one)

    collect()
    return found


def _spread(layers: int, zero: int) -> KindPlacement:
    """Blocks with whatever may leave the GPU on every tier, state on all three."""
    away = {Tier.GPU: 1, Tier.HOST: layers - 2, Tier.NVME: 1}
    here = {Tier.GPU: layers}
    return KindPlacement(
        layers=layers,
        parameters=away if zero == 3 else here,
        gradients=away if zero >= 2 else here,
        activations={
            Recompute.NONE: {Tier.NVME: 1, Tier.HOST: layers - 2},
            Recompute.FULL: {Tier.HOST: 1},
        },
        optimizer={Tier.GPU: 0.5, Tier.HOST: 0.75, Tier.NVME: layers - 1.25},
    )


def placed_everywhere(zero: int, chunk: int = CHUNK, *, tied: bool = False) -> Placement:
    parameters = Tier.HOST if zero == 3 else Tier.GPU
    gradients = Tier.HOST if zero >= 2 else Tier.GPU
    end = kind_placement(1, parameters, gradients, optimizer=Tier.HOST)
    return placed(
        chunk=chunk,
        embedding=kind_placement(1, optimizer=Tier.HOST) if tied else end,
        block=_spread(3, zero),
        head=kind_placement(1, parameters, gradients, optimizer=Tier.NVME),
    )


def _streaming(zero: int) -> Placement:
    """State passes through the GPU, beside the CPU's and alone."""
    gradients = Tier.HOST if zero >= 2 else Tier.GPU
    return placed(
        chunk=SHORT,
        embedding=streamed_kind(Tier.GPU, Tier.GPU, 0.6),
        block=_spread(3, zero).model_copy(update={"streamed": 0.5}),
        head=streamed_kind(Tier.GPU, gradients, 1.0),
    )


def cases(ranks: int, zero: int, data: str) -> dict[str, Plan]:
    """By name. Sums of `same` ones have the plain loop's order on two ranks.

    Stages of ZeRO cut a layer's elements, whatever tensors these are. So parts of families are with
    the last one alone, which gathers parameters, too, and only those whose blocks or heads are of
    several kinds or have biases; experts and a tied table with each. Groups of micro-batches pass
    whatever is in a block, too: of families and experts there is one, of more than two ranks, too.
    """
    many = 4 * ranks if ranks == 2 else 2 * ranks
    group = Strategy(dp=ranks, zero=zero, accumulation_group=2)
    one = Strategy(dp=ranks, zero=zero, micro_batch=2)
    resident = placed(embedding=kind_placement(1), block=kind_placement(3), head=kind_placement(1))
    model = tiny_model(layers=3)
    tied = tiny_model(layers=3, tied_embeddings=True)
    mixed = {"precision": "bf16", "clip_norm": INACTIVE}
    scaled = {  # the first steps overflow
        "precision": "fp16",
        "gradient_precision": "fp16",
        "loss_scale": LossScale(initial=2.0**20),
        "optimizer": Optimizer(name="sgd", learning_rate=0.5),
    }
    everywhere, streaming = placed_everywhere(zero, SHORT), _streaming(zero)
    found = {
        "same-resident": plan_of(model, tiny_training(2 * ranks), group, resident),
        "same-everywhere": plan_of(model, tiny_training(2 * ranks), group, everywhere),
        "same-streamed": plan_of(model, tiny_training(2 * ranks), group, streaming),
        "same-bf16": plan_of(model, tiny_training(2 * ranks, **mixed), one, everywhere),
        "clipped": plan_of(model, tiny_training(many, clip_norm=0.5), one, everywhere),
        # Two groups where gradients are shared out and parameters not: by itself with stage 2.
        "fp16": plan_of(
            model, tiny_training((4 if zero == 2 else 2) * ranks, **scaled), group, streaming
        ),
        "tied": plan_of(
            tied,
            tiny_training(4 * ranks, **mixed, seed=1),
            group,
            placed_everywhere(zero, tied=True),
        ),
        "experts": plan_of(
            tiny_model(layers=3, **EXPERTS),
            tiny_training(2 * ranks, clip_norm=0.5),
            group,
            everywhere,
        ),
        MASKED: plan_of(model, masked_training(many, data), group, everywhere),
    }
    if zero == 3:
        clipped, where = tiny_training(2 * ranks, clip_norm=0.5), placed_everywhere(3, tied=True)
        biased = tiny_model(layers=3, **FAMILIES["gpt-oss"])
        found["gpt-oss"] = plan_of(biased, clipped, group, where)
        several_kinds = (("beside", BESIDE), ("nemotron-3", NEMOTRON_3), ("gemma-4", GEMMA4))
        for name, parts in several_kinds:
            found[name] = anywhere(tiny_model(layers=3, **parts), clipped, group)
    if zero:
        own = tiny_model(layers=4, tied_embeddings=True, **GEMMA4_E)
        found["gemma-4-e"] = anywhere(own, tiny_training(2 * ranks, clip_norm=0.5), group)
    return found


def anywhere(model: ModelSpec, training: Training, strategy: Strategy) -> Plan:
    """Of a model whose blocks are of several kinds, wherever."""
    *_, placement = drawn(placements(build_graph(model, training, strategy), free=True), 6)
    return plan_of(model, training, strategy, placement.model_copy(update={"chunk": SHORT}))


def pipelines(ranks: int) -> dict[str, Plan]:
    """By name. Sums of `same` ones have the plain loop's order: those of one process.

    Stages hand on hidden states, whatever is within a block: of families there are those whose
    blocks differ or balance over all stages. ZeRO's first stages beside pipelines have a tied
    table (tied_pipelines) or virtual stages.
    """
    found = {}
    for layout in layouts(ranks):
        if layout.pp == 1 or (layout.zero in (1, 2) and layout.vpp == 1):
            continue
        if layout.dp > 1 and not layout.zero:  # replicas alone: a tied table has them
            continue
        if layout.pp > 2 and not layout.first_blocks:  # two have as many blocks each
            continue
        blocks = layout.pp * layout.vpp + (layout.first_blocks or (layout.vpp == 1))
        model = tiny_model(layers=blocks)
        name = name_of(layout)
        exact = "same-" if layout.dp == layout.tp == 1 else ""
        batch = 2 * layout.pp * layout.dp  # as many micro-batches again as fill the stages
        training = tiny_training(batch, clip_norm=INACTIVE)
        resident = all_resident(build_graph(model, training, layout))
        found[f"{exact}{name}"] = plan_of(model, training, layout, resident)
        training = tiny_training(batch // 2, clip_norm=INACTIVE)  # of families: as fill the stages
        if ranks == 2 and layout.vpp == 1:
            balanced = tiny_model(layers=blocks, **EXPERTS)
            found[f"experts-{name}"] = plan_of(balanced, training, layout, resident)
            other = tiny_model(layers=3, **QWEN3_NEXT)
            found[f"same-qwen3-next-{name}"] = anywhere(other, training, layout)
            own = tiny_model(layers=4, **GEMMA4_E)
            found[f"same-gemma-4-e-{name}"] = anywhere(own, training, layout)
        if ranks == 2 and layout.vpp > 1:  # chunks of unlike blocks
            for part, fields in (("beside", BESIDE), ("nemotron-h", NEMOTRON_H)):
                other = tiny_model(layers=5, **fields)
                found[f"same-{part}-{name}"] = anywhere(other, training, layout)
        if ranks == 2 and layout.vpp == 1:  # of others the norm is compared
            clipped = tiny_training(batch, clip_norm=0.5, precision="bf16")
            found[f"clipped-{name}"] = plan_of(model, clipped, layout, resident)
    return found


def all_resident(graph: Graph) -> Placement:
    """All on the GPUs."""
    stages = []
    for stage in range(graph.strategy.pp):
        kinds = Counter(graph.layers[layer] for layer in graph.stage_layers(stage))
        stages.append(StagePlacement(kinds={k: kind_placement(n) for k, n in kinds.items()}))
    return Placement(stages=tuple(stages), chunk=CHUNK)


GPT2 = {
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "positions": "learned",
    "position_offset": 2,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
    "vocab": 257,  # of which no number of ranks has equal parts
}


def tied_pipelines(ranks: int) -> dict[str, Plan]:
    """Whose first stage lends its table to the last. Of one micro-batch its sums have one order.

    Under ZeRO the last stage's head has no parameters of its own.
    """
    four = [Strategy(dp=2, pp=2, zero=zero) for zero in (0, 2)]
    split = Strategy(dp=max(1, ranks // 4), tp=2, pp=2, zero=int(ranks == 8))
    plans = {}
    for layout in {2: [Strategy(dp=1, pp=2)], 4: [*four, split], 8: [split]}[ranks]:
        fields = GPT2 if layout.tp > 1 else {"tied_embeddings": True}
        weightless = {"norm": "layernorm", "norm_bias": False, "weightless_norms": "all"}
        model = tiny_model(layers=4, **fields | (weightless if layout.zero == 2 else {}))
        several = layout.zero or layout.tp > 1
        for micro_batches in (1, 4) if ranks == 2 else (4,) if several else (1,):
            exact = micro_batches == 1 and layout.tp == 1
            clip_norm = INACTIVE if exact else None
            training = tiny_training(micro_batches * layout.dp, clip_norm=clip_norm)
            placement = all_resident(build_graph(model, training, layout))
            name = f"tied-{name_of(layout)}-{micro_batches}"
            plans["same-" * exact + name] = plan_of(model, training, layout, placement)
            if ranks == 2 and exact:  # with more micro-batches, the tied model alone
                for family in ENDS:
                    other = tiny_model(layers=4, **FAMILIES[family])
                    name = f"{family}-{name_of(layout)}-{micro_batches}"
                    plans["same-" * exact + name] = plan_of(other, training, layout, placement)
    return plans


def split_cases(ranks: int, data: str) -> dict[str, Plan]:
    """Tensor-parallel ranks, by name: what else a step may have with two, then other layouts.

    Layers of every family, split by sequence or not and recomputed in every way:
    test_tensor_parallel.py. Here is what a plan may do beside them.
    """
    model, two = tiny_model(layers=3), Strategy(dp=1, tp=2, accumulation_group=2)
    everywhere, streaming = placed_everywhere(3, SHORT), _streaming(3)
    if ranks > 2:
        found = {}
        for layout in splits(ranks):
            if layout.pp == 1 and layout.zero != 1:  # which eight ranks have beside stages, too
                training = masked_training(2 * layout.dp, data, clip_norm=0.5)
                where = placed_everywhere(layout.zero, SHORT) if layout.zero else everywhere
                if layout.dp > 1 and not layout.zero:
                    where = all_resident(build_graph(model, training, layout))
                found[name_of(layout)] = plan_of(model, training, layout, where)
        return found
    gpt2 = tiny_model(layers=3, **GPT2)
    whole = two.model_copy(update={"sequence_parallel": False})
    clipped, once = tiny_training(4, clip_norm=0.5), tiny_training(2, clip_norm=0.5)
    scaled = tiny_training(
        4,
        precision="fp16",
        gradient_precision="fp16",
        loss_scale=LossScale(initial=2.0**20),  # the first steps overflow
        optimizer=Optimizer(name="sgd", learning_rate=0.5),
    )
    found = {
        "tp2-everywhere": plan_of(model, clipped, two, everywhere),
        "tp2-gpt2": plan_of(gpt2, clipped, two, placed_everywhere(3, tied=True)),
        "tp2-whole-gpt2": plan_of(gpt2, clipped, whole, placed_everywhere(3, tied=True)),
        "tp2-fp16": plan_of(model, scaled, two, streaming),
        "tp2-bf16": plan_of(model, tiny_training(4, precision="bf16"), two, everywhere),
        f"{MASKED}-tp2": plan_of(model, masked_training(4, data), two, everywhere),
    }
    balanced, biased = (tiny_model(layers=3, **one) for one in (EXPERTS, FAMILIES["gpt-oss"]))
    found["tp2-experts"] = plan_of(balanced, once, two, everywhere)
    found["tp2-gpt-oss"] = plan_of(biased, once, two, placed_everywhere(3, tied=True))
    for part, fields in (("beside", BESIDE), ("gemma-4", GEMMA4)):
        found[f"tp2-{part}"] = anywhere(tiny_model(layers=3, **fields), once, two)
    apart = masked_training(4, data, clip_norm=0.5, isolate_documents=True)
    found["tp2-isolated"] = anywhere(tiny_model(layers=3, **QWEN3_NEXT), apart, two)
    normed = tiny_model(layers=3, vocab=257, qk_norm=True, qkv_bias=True, head_bias=True)
    for recompute in (Recompute.MLP, Recompute.FULL):
        again = kind_placement(3).model_copy(update={"activations": {recompute: {Tier.GPU: 3}}})
        where = placed(embedding=kind_placement(1), block=again, head=kind_placement(1))
        found[f"tp2-{recompute}"] = plan_of(normed, once, two, where)
    return found


def write_plans(folder: Path, plans: dict[str, Plan]) -> None:
    """For the processes to read."""
    (folder / "plans").write_bytes(pickle.dumps(plans))


def _steps(name: str, plan: Plan) -> int:
    """Of the plan of that name."""
    if name in LONGER:
        return LONG
    once = plan.cluster.group.gpu.device == "cpu" and any(part in name for part in PARTS)
    return 1 if once else steps_of(plan)


def run_rank(
    rank: int,
    folder: str,
    backend: str | None = None,
    own_gpu: bool = False,
    *,
    looks: bool = True,
) -> None:
    """One process: execute every plan and leave what it computed in the folder."""
    if own_gpu:
        take_gpu(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = Path(folder)
    plans: dict[str, Plan] = pickle.loads((path / "plans").read_bytes())
    for name, plan in plans.items():
        meeting, steps = path / f"{name}.meeting", _steps(name, plan)
        run = execute(
            plan,
            rank=rank,
            meeting=meeting,
            steps=steps,
            backend=backend,
            validates=name.startswith(MASKED),
            looks=looks,
        )
        torch.save(run, path / f"{name}.{rank}.pt")


def run_rank_unseen(rank: int, folder: str) -> None:
    """The same, for tests that compare losses, norms and the last weights alone."""
    run_rank(rank, folder, looks=False)


def executed(folder: Path, ranks: int, cases: Callable[[str], dict[str, Plan]]) -> Ran:
    """Let processes execute plans, all in one start; `cases` makes them for a folder of data."""
    torch.set_num_threads(1)
    plans = cases(str(prepare_masked(str(folder))))
    write_plans(folder, plans)
    start(run_rank, folder, ranks)
    return ranks, folder, plans


def results(folder: Path, name: str, ranks: int) -> list[Run]:
    """What the ranks left."""
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(ranks)]


def check_same_model(runs: Sequence[Run]) -> None:
    """Assert that all ranks had the same losses and ended with the same model."""
    first, *others = runs
    assert first.finished.digest
    for other in others:
        assert first.finished.digest == other.finished.digest
        assert first.losses == other.losses


def check_validation(plan: Plan, runs: Sequence[Run]) -> None:
    """Assert that all ranks had the validation's loss that one alone has."""
    one = plan.strategy.model_copy(update={"dp": 1, "cp": 1, "tp": 1, "zero": 0})
    alone = plan.model_copy(update={"strategy": one})
    losses = [run.validated for run in runs]
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(evaluated(alone), rel=1e-6)


def unequal(ranks: int, data: str = "") -> dict[str, Plan]:
    """Replicas with micro-batches of unlike sizes, by name; gradients on every tier with ZeRO.

    `data`: masked; empty: bundled text, without validation.
    """
    model, found = tiny_model(layers=3), dict[str, Plan]()
    layouts = [Strategy(dp=2, zero=zero) for zero in range(4)]
    if ranks == 4:
        beside = Strategy(dp=2, tp=2), Strategy(dp=2, cp=2, zero=1), Strategy(dp=2, pp=2, zero=3)
        layouts = [*beside, Strategy(dp=2, pp=2, vpp=2, zero=1), Strategy(dp=4, zero=2)]
    for layout in layouts:
        sizes = ((1, 2), (1, 1)) if layout.dp == 2 else ((1, 3), (2, 2), (1, 1))
        groups = tuple(Replicas(number=n, micro_batch=b) for n, b in sizes)
        largest = {"micro_batch": sizes[0][1], "replicas": groups}
        strategy = layout.model_copy(update={**largest, "accumulation_group": 3 - layout.vpp})
        batch = 8 // ranks * strategy.sequences
        training = tiny_training(batch, clip_norm=0.5)
        if data:
            training = masked_training(batch, data, clip_norm=0.5)
        deep = model if layout.pp == 1 else tiny_model(layers=4)
        where = all_resident(build_graph(deep, training, strategy))
        if layout.zero and layout.pp == layout.cp == 1:
            where = placed_everywhere(layout.zero, SHORT)
        found[f"{MASKED if data else 'same'}-{name_of(layout)}"] = plan_of(
            deep, training, strategy, where
        )
    return found


def every_plan(folder: Path, ranks: int, number: int) -> dict[str, Plan]:
    """Fixed ones of every layout, of more than two ranks fewer, and so many random ones."""
    data = str(masked_data(str(folder)))
    every = {
        f"{name}-z{zero}": plan
        for zero in (1, 2, 3)
        for name, plan in cases(ranks, zero, data).items()
        if name not in ONCE[zero]
    }
    fixed = {n: plan for n, plan in every.items() if ranks == (4 if n == OF_FOUR else 2)}
    piped = pipelines(ranks) | tied_pipelines(ranks)
    return fixed | split_cases(ranks, data) | piped | random_plans(ranks, number)
