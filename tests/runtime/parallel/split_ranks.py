"""Every rank of a run in this process: they fill memory and move checkpoints, and do not train."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from hypothesis import strategies as st

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import splits_over_context_parallel
from bigplan.lower import lower_stage
from bigplan.placement import KindPlacement, Placement, StagePlacement
from bigplan.plan import Plan, digest, graph_of
from bigplan.program import Op, expand
from bigplan.ranks import Coordinates
from bigplan.runtime.checkpoint import Manifest, Saver, latest
from bigplan.runtime.context import Context, layer_rows
from bigplan.runtime.memory.buffers import Memory
from bigplan.runtime.parallel.groups import Groups
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.runtime.harness import joined, own_state
from tests.runtime.parallel.sharded_ranks import BESIDE, EXPERTS
from tests.runtime.plans import CHUNK, SHORT, models, plan_of, tiny_model, tiny_training
from tests.runtime.reference import State
from tests.toys import placements

TP = (1, 2, 3, 4, 8)


@contextmanager
def every_rank(plan: Plan) -> Iterator[list[Context]]:
    """All ranks, memory filled with NaN."""
    graph, strategy = graph_of(plan), plan.strategy
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contexts = []
        for rank in range(strategy.ranks):
            at = Coordinates.of(rank, strategy)
            program = lower_stage(graph, plan.placement, at.stage)
            memory = Memory(program, torch.device("cpu"), scratch / f"{rank}.bin")
            stack.callback(memory.close)
            memory.poison_all()
            rows, groups = layer_rows(plan.model, graph, program, at), Groups(at, strategy)
            contexts.append(
                Context(plan.model, plan.training, graph, program, memory, rows, groups)
            )
        yield contexts


def state_of_all(contexts: Sequence[Context]) -> State:
    """What the ranks have as one; of what several have, the bits are equal."""
    states = [own_state(context) for context in contexts]
    return tuple(joined(layers) for layers in zip(*states, strict=True))


def write(contexts: Sequence[Context], plan: Plan, folder: Path) -> Manifest:
    """A checkpoint of what all ranks have."""
    manifest = Manifest(
        step=1,
        model=plan.model,
        training=plan.training,
        plan=digest(plan),
        state={},
        files=(),
    )
    savers = [Saver(context, folder, manifest) for context in contexts]
    savers[0].prepare()
    for saver, context in zip(savers, contexts, strict=True):
        for action in expand(context.program.save):
            if action.op is Op.CKPT:
                saver.write(action)
        assert saver.ended, saver.error
    for saver in savers[1:]:
        saver.close()
    assert not savers[0].seal(file for saver in savers for file in saver.stored)
    saved = savers[0].commit("")
    assert not saved.error
    return latest(folder).manifest


@st.composite
def split_pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two plans of one training, each split anyhow: words that fill up, few key-value heads."""
    splits = [draw(st.sampled_from(TP)) for _ in range(2)]
    fit = [n for n in (1, 2, 4, 24) if all(n % tp == 0 or tp % n == 0 for tp in splits)]
    changes = {
        "heads": 24,  # of width 2: as many as each split divides
        "kv_heads": draw(st.sampled_from(fit)),
        "head_dim": 2,
        "rotary_fraction": 1.0,
        "vocab": draw(st.sampled_from((256, 251, 5))),
    }
    model = draw(models())
    changes["ffn"] = 48 * model.has_mlp
    if model.latent_attention is not None:
        changes |= {"kv_heads": 24, "head_dim": model.head_dim}
    if model.convolution is not None:
        changes |= {"hidden": 48}  # channels
    if model.delta_rule is not None:
        own = {"key_heads": 24, "value_heads": 24}
        model = model.model_copy(update={"delta_rule": model.delta_rule.model_copy(update=own)})
    if model.state_space is not None:
        space = model.state_space
        own = {"heads": 24, "groups": 24 if space.groups > 1 else 1}
        model = model.model_copy(update={"state_space": space.model_copy(update=own)})
    changes |= {key: 48 for key in ("shared_ffn", "dense_ffn") if getattr(model, key)}
    model = model.model_copy(update=changes)
    training = tiny_training(
        4,
        precision=draw(st.sampled_from(("fp32", "bf16"))),
        clip_norm=draw(st.sampled_from((None, 0.5))),
    )
    one, two = (draw(_split(model, training, tp)) for tp in splits)
    return one, two


@st.composite
def spread_pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two plans of one training of a model with experts, each spread over ranks anyhow, or not."""
    beside = draw(st.booleans())
    model = tiny_model(layers=2, **BESIDE if beside else EXPERTS)
    training = tiny_training(
        4,
        precision=draw(st.sampled_from(("fp32", "bf16"))),
        clip_norm=draw(st.sampled_from((None, 0.5))),
    )
    one, two = (draw(_spread(model, training)) for _ in range(2))
    return one, two


@st.composite
def _spread(draw: st.DrawFn, model: ModelSpec, training: Training) -> Plan:
    dp, cp, tp = draw(
        st.sampled_from(((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)))
    )
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if dp * cp % n == 0]))
    pp = draw(st.sampled_from((1, 2)))
    zero = draw(st.integers(0, 3)) if dp * cp > 1 else 0
    group = draw(st.sampled_from((0, 2))) if zero and dp * cp == 4 and ep < 4 else 0
    strategy = Strategy(dp=dp, cp=cp, tp=tp, ep=ep, pp=pp, zero=zero, zero_group=group)
    placement = draw(placements(build_graph(model, training, strategy), free=True))
    chunk = draw(st.sampled_from((SHORT, CHUNK)))
    return plan_of(model, training, strategy, placement.model_copy(update={"chunk": chunk}))


def resident(model: ModelSpec, training: Training, strategy: Strategy) -> Plan:
    """Everything on the GPU, of one stage."""
    layers = model.layer_sequence()
    kinds = {kind: KindPlacement.on_gpu(layers.count(kind)) for kind in model.kinds()}
    placement = Placement(stages=(StagePlacement(kinds=kinds),), chunk=CHUNK)
    return plan_of(model, training, strategy, placement)


@st.composite
def _split(draw: st.DrawFn, model: ModelSpec, training: Training, tp: int) -> Plan:
    pp = draw(st.sampled_from((1, 2))) if model.layers > 1 else 1
    dp = draw(st.sampled_from((1, 2)))
    cp = draw(st.sampled_from([n for n in (1, 2) if splits_over_context_parallel(model, tp, n)]))
    zero = draw(st.integers(0, 3)) if dp * cp > 1 else 0
    group = draw(st.sampled_from((0, 2))) if zero and dp * cp == 4 else 0
    strategy = Strategy(dp=dp, cp=cp, tp=tp, pp=pp, zero=zero, zero_group=group)
    placement = draw(placements(build_graph(model, training, strategy), free=True))
    chunk = draw(st.sampled_from((SHORT, CHUNK)))
    return plan_of(model, training, strategy, placement.model_copy(update={"chunk": chunk}))
