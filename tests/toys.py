"""Toy graphs, prices and placements: small enough to play thousands, with every part there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st

from bigplan.cost import Costs, KindCost, Rates
from bigplan.graph.graph import ElementSizes, Graph, LayerKind, Recompute, Rerun, Tensor
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import layer_table, pieces
from bigplan.lower import lower
from bigplan.placement import CHUNK, KindPlacement, Placement, Share, StagePlacement, Tier
from bigplan.program import Action, Program, Repeat
from bigplan.simulate import simulate
from bigplan.solve.candidate import Candidate
from bigplan.solve.decisions import decisions_of
from bigplan.solve.stage import stage_classes
from bigplan.spec.layers import BLOCKS
from bigplan.spec.sharing import NodeSharing
from bigplan.timeline import Timeline
from bigplan.units import PerRank

KINDS = ("embedding", "dense", "block", "head")
ROOMY = dict.fromkeys(Tier, 10**12)


def toy_kind(
    name: str,
    *,
    pinned: bool = False,
    stores_activations: bool = True,
    saved: int = 64,
    looked_up: int = 0,
    tp: int = 1,
    frozen: bool = False,
    rows: int = 8,
    ep: int = 1,
) -> LayerKind:
    """A matrix of `rows` rows of four, a unit each, and a vector. `tp` ranks have the vector.

    The matrix is what each of them has of one. A frozen block has a pair of adapters, of which
    `tp` ranks have the first whole; a frozen embedding has no backward. If `ep` ranks spread
    experts, each has a matrix of some, before the rest.
    """
    pair = (Tensor("a", 2, 4, holders=tp), Tensor("b", 8, 2))
    experts = (Tensor("e", 16, 4, experts=2),) if ep > 1 else ()
    return LayerKind(
        name=name,
        tensors=(*experts, Tensor("w", rows, 4), Tensor("n", 1, 4, holders=tp)),
        whole_experts=sum(tensor.elements for tensor in experts),
        ep=ep,
        uneven=12 if ep > 1 else 0,
        forward=(),
        backward=(),
        saved=saved,
        boundary=16,
        reruns={
            Recompute.SELECTIVE: Rerun(saved // 2, ()),
            Recompute.MLP: Rerun(max(16, 3 * saved // 8), ()),
            Recompute.FULL: Rerun(16, ()),
        },
        forward_workspace=8,
        backward_workspace=8,
        pinned=pinned,
        stores_activations=stores_activations,
        looked_up=looked_up,
        frozen=frozen,
        idle_backward=frozen and name == "embedding",
        adapters=pair if frozen and name == "block" else (),
    )


def toy_graph(
    strategy: Strategy | None = None,
    *,
    blocks: int = 4,
    units: int = 2,
    deferred: bool = True,
    master: bool = True,
    tied: bool = False,
    looked_up: int = 0,
    frozen: bool = False,
    dense: int = 0,
    in_turns: bool = False,
) -> Graph:
    """An embedding, `blocks` blocks and a head whose forward and backward are one.

    The first `dense` blocks are of another kind, or of the first ones every other is (`in_turns`).
    """
    strategy = strategy or Strategy(dp=1)
    between = ["dense"] * dense + ["block"] * (blocks - dense)
    if in_turns:
        turns = min(dense, blocks - dense)
        between = ["dense", "block"] * turns + between[turns : blocks - turns]
    return Graph(
        strategy=strategy,
        layers=("embedding", *between, "head"),
        kinds={
            "embedding": toy_kind(
                "embedding",
                stores_activations=False,
                pinned=tied,
                looked_up=looked_up,
                tp=strategy.tp,
                frozen=frozen,
            ),
            **({"dense": toy_kind("dense", tp=strategy.tp, saved=96, rows=5)} if dense else {}),
            "block": toy_kind("block", tp=strategy.tp, frozen=frozen, ep=strategy.ep),
            "head": toy_kind(
                "head", saved=0, stores_activations=False, tp=strategy.tp, frozen=frozen
            ),
        },
        sizes=ElementSizes(2, 4, 12, True) if master else ElementSizes(4, 4, 8, False),
        micro_batches=units * strategy.accumulation_group,
        deferred=deferred,
        tied=tied,
    )


RATES = Rates(
    h2d=PerRank(100.0),
    d2h=PerRank(100.0),
    nvme_read=PerRank(50.0),
    nvme_write=PerRank(50.0),
    host_memory=PerRank(400.0),
    device_memory=PerRank(1000.0),
    cpu_update=PerRank(100.0),
    gpu_update=PerRank(1000.0),
    state_in=PerRank(80.0),
    state_out=PerRank(80.0),
)
RERUN = {Recompute.SELECTIVE: 0.25, Recompute.MLP: 0.5, Recompute.FULL: 1.0}
COSTS = Costs(
    kinds={
        name: KindCost(1.0, 2.0, 0.5, 0.3, RERUN, tensor_reduce=0.2, sum_replicas=0.4)
        for name in KINDS
    },
    rates=RATES,
    send=0.1,
    capacity=ROOMY,
    sharing=NodeSharing(1),
    adapters=KindCost(0.0, 0.0, 0.5, tensor_reduce=0.2),
)


def kind_placement(
    layers: int,
    parameters: Tier = Tier.GPU,
    gradients: Tier = Tier.GPU,
    activations: tuple[Recompute, Tier] = (Recompute.NONE, Tier.GPU),
    optimizer: Tier = Tier.GPU,
) -> KindPlacement:
    """All layers alike."""
    recompute, tier = activations
    return KindPlacement(
        layers=layers,
        parameters={parameters: layers},
        gradients={gradients: layers},
        activations={recompute: {tier: layers}},
        optimizer={optimizer: float(layers)},
    )


def placed(graph: Graph, slots: int = 3, chunk: int = CHUNK, **kinds: KindPlacement) -> Placement:
    """All on the GPU, except the kinds given (their `layers` are those of one stage)."""
    stages = []
    for stage in range(graph.strategy.pp):
        names = [graph.layers[layer] for layer in graph.stage_layers(stage)]
        stages.append(
            StagePlacement(
                kinds={
                    name: kinds.get(name) or kind_placement(names.count(name))
                    for name in dict.fromkeys(names)
                }
            )
        )
    return Placement(stages=tuple(stages), slots=slots, chunk=chunk)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, its prices, and one way to place it."""

    graph: Graph
    costs: Costs
    placement: Placement

    @property
    def programs(self) -> tuple[Program, ...]:
        """The placement, lowered."""
        return lower(self.graph, self.placement)

    @property
    def timeline(self) -> Timeline:
        """The placement, simulated."""
        return simulate(self.programs, self.graph, self.costs)

    @property
    def candidate(self) -> Candidate:
        """What the solver sees."""
        return Candidate(self.graph.strategy, self.graph, self.costs)


def enlarged(graph: Graph, factor: int = 1 << 20) -> Graph:
    """The graph with every size times `factor`: a solver rounds away the toys' bytes, not MiB."""
    kinds = {
        name: replace(
            kind,
            tensors=tuple(replace(t, columns=t.columns * factor) for t in kind.tensors),
            adapters=tuple(replace(t, columns=t.columns * factor) for t in kind.adapters),
            whole_experts=kind.whole_experts * factor,
            uneven=kind.uneven * factor,
            saved=kind.saved * factor,
            boundary=kind.boundary * factor,
            reruns={r: way._replace(kept=way.kept * factor) for r, way in kind.reruns.items()},
            forward_workspace=kind.forward_workspace * factor,
            backward_workspace=kind.backward_workspace * factor,
        )
        for name, kind in graph.kinds.items()
    }
    return replace(graph, kinds=kinds)


def quickened(costs: Costs, factor: int = 1 << 20) -> Costs:
    """Prices at which an enlarged graph takes as long as the small one."""
    rates = {f.name: getattr(costs.rates, f.name) * factor for f in fields(Rates)}
    return replace(costs, rates=Rates(**rates | {"latency": costs.rates.latency}))


@st.composite
def strategies(draw: st.DrawFn, stages: Sequence[int] = (1, 2, 4)) -> Strategy:
    """Pipelines, tensor, context and data parallelism, every ZeRO stage, accumulation groups."""
    dp, cp, tp = (draw(st.sampled_from((1, 2))) for _ in range(3))
    pp = draw(st.sampled_from(stages))
    if pp > 1 and draw(st.booleans()):
        zero, vpp = draw(st.integers(0, 1)) if dp * cp > 1 else 0, draw(st.sampled_from((2, 3)))
        return Strategy(dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp, zero=zero)
    return Strategy(
        dp=dp,
        cp=cp,
        tp=tp,
        pp=pp,
        zero=draw(st.integers(0, 3)) if dp * cp > 1 else 0,
        accumulation_group=draw(st.sampled_from((1, 2, 4))),
        # Of at least four blocks at least one is left for every other stage; two stages share all.
        first_blocks=draw(st.integers(0, 1)) if pp > 1 else 0,
        last_blocks=draw(st.integers(0, 1)) if pp > 2 else 0,
    )


@st.composite
def graphs(draw: st.DrawFn, stages: Sequence[int] = (1, 2, 4)) -> Graph:
    """Toy graphs: tied, frozen, updates deferred, with master weights, or not."""
    strategy = draw(strategies(stages))
    blocks, units = draw(st.integers(4, 9)), draw(st.sampled_from((1, 2, 3, 5, 8)))
    if strategy.vpp > 1:  # micro-batches fill the stages evenly, chunks differ by one block
        chunks = strategy.pp * strategy.vpp
        blocks = draw(st.integers(chunks, 2 * chunks))
        units = strategy.pp * draw(st.sampled_from((1, 2, 3, 5)))
    tied = draw(st.booleans())
    alone = strategy.ranks == 1 and not tied
    frozen = strategy.zero in (0, 3) and draw(st.booleans())
    if not frozen and strategy.tp == strategy.cp == 1 and strategy.dp == 2:
        dp, ep = draw(st.sampled_from(((2, 1), (2, 2), (4, 2))))
        strategy = strategy.model_copy(update={"dp": dp, "ep": ep})
    if strategy.zero and draw(st.booleans()):  # of groups with all experts, once or twice
        several = {"dp": 2 * strategy.dp, "zero_group": strategy.shards}
        strategy = strategy.model_copy(update=several)
    return toy_graph(
        strategy,
        blocks=blocks,
        units=units,
        deferred=draw(st.booleans()),
        master=draw(st.booleans()),
        tied=tied,
        looked_up=draw(st.sampled_from((0, 4, 8))) if alone else 0,
        frozen=frozen,
        dense=0 if frozen else draw(st.sampled_from((0, 0, 1, 3))),
        in_turns=draw(st.booleans()),
    )


@st.composite
def prices(draw: st.DrawFn) -> Costs:
    """Compute, network and every link fast or slow beside each other."""
    rate = st.sampled_from((10.0, 40.0, 150.0, 600.0, 2500.0))
    short = st.sampled_from((0.25, 0.5, 1.0, 2.0))
    zero = st.sampled_from((0.0, 0.3, 2.0))
    again = st.sampled_from(((0.0, 0.0, 0.25), (0.1, 0.2, 0.25), (0.25, 0.25, 1.0)))
    return Costs(
        kinds={
            name: KindCost(
                draw(short),
                draw(short),
                draw(zero),
                draw(zero),
                dict(zip(RERUN, draw(again), strict=True)),
                tensor_reduce=draw(zero),
                sum_replicas=draw(zero),
            )
            for name in KINDS
        },
        rates=Rates(*(PerRank(draw(rate)) for _ in range(10))),
        send=draw(st.sampled_from((0.0, 0.1, 1.0))),
        capacity=ROOMY,
        sharing=NodeSharing(1),
        table=draw(st.sampled_from(((0.1, 0.2), (3.0, 5.0)))),
        adapters=KindCost(0.0, 0.0, draw(zero), tensor_reduce=draw(zero)),
    )


def compositions(layers: int, parts: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`layers` split over `parts` choices."""
    where = st.integers(0, parts - 1)
    return st.lists(where, min_size=layers, max_size=layers).map(
        lambda drawn: tuple(drawn.count(part) for part in range(parts))
    )


@st.composite
def kind_placements(draw: st.DrawFn, graph: Graph, name: str, layers: int) -> KindPlacement:
    """Any legal placement of the layers of a kind."""
    kind, zero = graph.kinds[name], graph.strategy.zero
    everywhere = compositions(layers, len(Tier))
    on_gpu = (layers, 0, 0)
    chunked = graph.strategy.vpp > 1  # then only recomputation and the optimizer vary
    parameters = on_gpu if kind.pinned or chunked or zero in (1, 2) else draw(everywhere)
    gradients = on_gpu if kind.pinned or chunked or zero == 1 else draw(everywhere)
    policies: tuple[int, ...] = (layers, 0, 0)
    if kind.stores_activations and chunked:
        each = draw(compositions(layers, len(graph.recomputes)))
        policies = tuple(n for number in each for n in (number, 0, 0))
    elif kind.stores_activations:
        policies = draw(compositions(layers, len(Tier) * len(graph.recomputes)))
    activations = {
        recompute: dict(zip(Tier, policies[3 * i : 3 * i + 3], strict=True))
        for i, recompute in enumerate(graph.recomputes)
        if policies[3 * i : 3 * i + 3]
    }
    for recompute, kept in activations.items():
        if kind.varies(recompute):  # numbers of rows are not known before, so that they stay
            activations[recompute] = {Tier.GPU: sum(kept.values())}
    where = dict(zip(Tier, parameters, strict=True))
    if kind.frozen:
        return KindPlacement(layers=layers, parameters=where, activations=activations)
    twelfth = st.integers(0, 12).map(lambda number: number / 12)
    gpu = draw(twelfth) * min(parameters[0], gradients[0])
    host = draw(twelfth) * (layers - gpu)
    in_memory = layers - max(parameters[2], gradients[2])
    streamed = draw(twelfth) * max(0.0, min(host, in_memory - gpu))
    return KindPlacement(
        layers=layers,
        parameters=where,
        gradients=dict(zip(Tier, gradients, strict=True)),
        activations=activations,
        optimizer=dict(zip(Tier, (gpu, host, max(0.0, layers - gpu - host)), strict=True)),
        streamed=streamed,
    )


@st.composite
def placements(draw: st.DrawFn, graph: Graph, *, free: bool = False) -> Placement:
    """Any legal placement; `free`: what the solver does not choose varies too.

    That is: every stage of its own, and NVMe chunks smaller than a layer's state.
    """
    every: list[StagePlacement] = []
    for stage in stage_classes(graph):
        for number in range(len(stage.stages)):
            if number == 0 or free:
                kinds = {k.name: draw(kind_placements(graph, k.name, n)) for k, n in stage.kinds}
            every.append(StagePlacement(kinds=kinds))
    return Placement(
        stages=tuple(every),
        slots=draw(st.integers(1, 4)),
        sums=draw(st.integers(1, 2)),
        shared_ends=draw(st.booleans()),
        chunk=draw(st.sampled_from((100, CHUNK))) if free else CHUNK,
    )


@st.composite
def cases(draw: st.DrawFn, stages: Sequence[int] = (1, 2, 4), *, free: bool = False) -> Case:
    """A graph with prices and a placement."""
    graph = draw(graphs(stages))
    prices_and_placement = draw(prices()), draw(placements(graph, free=free))
    documents = draw(st.sampled_from((0, 640)))  # bytes of where they are
    handed, carried = draw(st.sampled_from(((0, 0), (96, 224))))  # beside hidden states
    changed = replace(graph, document_bytes=documents, handed=handed, carried=carried)
    return Case(changed, *prices_and_placement)


@st.composite
def muon_cases(draw: st.DrawFn) -> Case:
    """Cases whose blocks' matrices Muon updates: whole layers, on the GPU or streamed.

    `n` is AdamW's to update. Nothing of such layers but activations is on drives.
    """
    dp, pp = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    toy = toy_graph(
        Strategy(dp=dp, pp=pp, zero=zero),
        units=draw(st.sampled_from((1, 3))),
        deferred=draw(st.booleans()),
        master=draw(st.booleans()),
    )
    case = Case(toy, draw(prices()), draw(placements(toy)))
    old, master = case.graph.sizes, case.graph.sizes.master
    kinds = {
        name: replace(kind, orthogonalised=kind.tensors[:1], directions=kind.tensors[:1])
        if name in BLOCKS
        else kind
        for name, kind in case.graph.kinds.items()
    }
    sizes = ElementSizes(old.parameter, old.gradient, 8 if master else 4, master, second=4)
    found = {
        name: replace(cost, orthogonalise=draw(st.sampled_from((0.0, 0.5, 3.0))))
        if name in BLOCKS
        else cost
        for name, cost in case.costs.kinds.items()
    }
    stages = [
        StagePlacement(
            kinds={
                name: _by_muon(kind, draw(st.integers(0, 9))) if name in BLOCKS else kind
                for name, kind in stage.kinds.items()
            }
        )
        for stage in case.placement.stages
    ]
    # Stages of a class are alike.
    graph = replace(case.graph, kinds=kinds, sizes=sizes)
    for alike in stage_classes(graph):
        for number in alike.stages:
            stages[number] = stages[alike.stages[0]]
    placement = case.placement.model_copy(update={"stages": tuple(stages)})
    return Case(graph, replace(case.costs, kinds=found), placement)


def _by_muon(kind: KindPlacement, on_gpu: int) -> KindPlacement:
    """The placement without drives, the state of so many layers on the GPU where they may be."""
    parameters, gradients = (
        {Tier.GPU: at.get(Tier.GPU, 0), Tier.HOST: kind.layers - at.get(Tier.GPU, 0)}
        for at in (kind.parameters, kind.gradients)
    )
    gpu = min(on_gpu, parameters[Tier.GPU], gradients[Tier.GPU])
    host = float(kind.layers - gpu)
    return KindPlacement(
        layers=kind.layers,
        parameters=parameters,
        gradients=gradients,
        activations=kind.activations,
        optimizer={Tier.GPU: float(gpu), Tier.HOST: host},
        streamed=host,
    )


def instructions(program: Program) -> Iterator[Action | Repeat]:
    """Every action and repeat block of a steady step, as written."""
    stack = list(program.step)[::-1]
    while stack:
        instruction = stack.pop()
        yield instruction
        if isinstance(instruction, Repeat):
            stack.extend(instruction.body[::-1])


def with_capacity(costs: Costs, **limits: int) -> Costs:
    """The same prices with less memory."""
    return replace(costs, capacity={t: limits.get(t.value, ROOMY[t]) for t in Tier})


def values_of(case: Case) -> dict[str, float]:
    """The model's decisions for the placement, optimizer shares as the whole units have them."""
    graph, values = case.graph, decisions_of(case.graph, case.placement)
    for stage in stage_classes(graph):
        kinds = case.placement.stages[stage.stages[0]].kinds
        for kind, _ in stage.kinds:
            owned = kind.owned(stage.sharded(kind, 1))
            where, rows = f"{stage.name}.{kind.name}", kinds[kind.name]
            for tier in Tier:
                each = _pieces(graph, rows, kind, [s for s in Share if s.tier is tier])
                values[f"{where}.optimizer.{tier}"] = sum(each) / owned
            values[f"{where}.streamed"] = sum(_pieces(graph, rows, kind, [Share.STREAMED])) / owned
    return values


def rows_moved(case: Case, stage: int, tier: Tier) -> float:
    """Elements by which a rank's whole units differ from the placement's shares."""
    moved = 0.0
    for name, rows in case.placement.stages[stage].kinds.items():
        kind = case.graph.kinds[name]
        ranks = case.graph.strategy.zero_ranks
        share = rows.optimizer.get(tier, 0.0) * kind.owned(ranks)
        each = _pieces(case.graph, rows, kind, [s for s in Share if s.tier is tier])
        moved += sum(each) - share
    return moved


def _pieces(
    graph: Graph, rows: KindPlacement, kind: LayerKind, shares: Sequence[Share]
) -> list[int]:
    """Elements that a rank owns of every layer in each of the shares."""
    whole = bool(kind.orthogonalised)
    table = layer_table(rows, frugal_first=graph.strategy.vpp > 1, whole_states=whole)
    ranks = graph.strategy.zero_ranks
    each = [pieces(kind, at, ranks) for at in table]
    return [len(cut[share]) for cut in each for share in shares]
