"""The placement problem of one strategy.

Sets       classes c of alike pipeline stages, layer kinds k with n layers, tiers t
Decisions  layers whose parameters, gradients are on t (integers); layers by activation policy
           (integers); share of the optimizer state on t, and of that in host memory what the GPU
           updates (continuous); switches for rings
Objective  min step + rho x serial transfer seconds of a step

With perfect overlap moves would look free. The surcharge rho breaks that tie, so that plans do not
depend on perfect overlap. With rho = 0 and without integrality the optimum is below every plan of
the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings, StagePlacement, Tier
from bigplan.solve.alike import ROOMY
from bigplan.solve.bounds import round_trips, sent_seconds
from bigplan.solve.ends import last_reduction, leading_seconds, trailing_seconds
from bigplan.solve.interleaved import interleaved_rows
from bigplan.solve.linear import EXACT, AtLeast, Linear, Problem, Rule, total, var
from bigplan.solve.memory import GIB, capacities, size_rules, size_variables
from bigplan.solve.pins import WRITTEN, Pin, pin_rules
from bigplan.solve.stage import (
    StageClass,
    placement_rules,
    stage_classes,
    switch_rules,
    unused_rules,
    variables,
)
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.times import (
    first_forward_rows,
    hop_rows,
    lane_rows,
    lane_seconds,
    pair_rows,
    pass_rows,
    step_rows,
)

# A transfer to drives pays this many times the surcharge of a copy. In the model both overlap
# perfectly. In simulations 1-10% of copies over PCIe are exposed, but up to half of transfers to
# drives, because these wait for two rings and for each other.
DRIVES = 5.0
WEAR = ": written to drives"  # how the rule is called that limits it


def formulate(
    graph: Graph, costs: Costs, most: Rings = ROOMY, least: Rings | None = None
) -> Problem:
    """Variables, rules, capacities and times of `graph` at `costs`.

    If memory holds fewer rings (`least`) than times count on (`most`), the relaxation is below
    plans with any number of rings between the two.
    """
    stages = stage_classes(graph, most, least)
    every = [StageTimes(stage, costs) for stage in stages]
    return replace(
        _untimed(stages, costs),
        times=(
            *_times(every, costs),
            *(row for times in every for row in lane_rows(times)),
            *_messages(graph, costs),
        ),
        serial=total([_surcharged(lane_seconds(times)) + _waited_for(times) for times in every]),
    )


def _messages(graph: Graph, costs: Costs) -> Iterator[AtLeast]:
    """What messages between stages take at least, wherever tensors are."""
    if costs.send:
        least = max(sent_seconds(graph, costs), round_trips(graph, costs))
        yield AtLeast("step", Linear() + least)


def untimed(graph: Graph, costs: Costs, most: Rings = ROOMY, least: Rings | None = None) -> Problem:
    """The same with steps of no time, which says what fits, in half of the time or less."""
    return _untimed(stage_classes(graph, most, least), costs)


def _untimed(stages: tuple[StageClass, ...], costs: Costs) -> Problem:
    return Problem(
        variables=tuple(v for s in stages for v in (*variables(s), *size_variables(s))),
        rules=tuple(
            rule
            for s in stages
            for rule in (
                *placement_rules(s),
                *switch_rules(s),
                *unused_rules(s),
                *size_rules(s),
            )
        ),
        capacities=tuple(row for s in stages for row in capacities(s, costs)),
        times=(AtLeast("step", Linear()),),
        serial=Linear(),
        spare=_spare(stages, ()),
    )


def pinned(problem: Problem, graph: Graph, costs: Costs, pins: tuple[Pin, ...]) -> Problem:
    """The problem of the graph at these costs with pins, whatever its rings."""
    stages = stage_classes(graph)
    rules = [rule for stage in stages for rule in pin_rules(stage, pins)]
    rules += [r for stage in stages for r in wear_rules(StageTimes(stage, costs), pins)]
    return replace(problem, rules=(*problem.rules, *rules), spare=_spare(stages, pins))


def _spare(stages: tuple[StageClass, ...], pins: tuple[Pin, ...]) -> frozenset[str]:
    """Decisions for ways to recompute that do what others do, but for ways that a pin names."""
    named = {(pin.kind, part) for pin in pins for part in pin.choice.split(".")}
    return frozenset(
        name
        for stage in stages
        for kind, _ in stage.kinds
        for way in stage.graph.repeated_ways(kind)
        if named.isdisjoint({(None, way), (kind.name, way)})
        for name in (variable.name for variable in variables(stage))
        if name.startswith(f"{stage.name}.{kind.name}.") and way in name.split(".")[2:]
    )


def wear_rules(times: StageTimes, pins: tuple[Pin, ...]) -> Iterator[Rule]:
    """A limit on the bytes that a stage's ranks write to their node's drives in a step, if set."""
    for pin in pins:
        if pin.tensor == WRITTEN and pin.amount is not None:
            rate = times.costs.sharing.rate_of_node(times.costs.rates.nvme_write) / GIB
            written = rate * lane_seconds(times)["write"]
            if written.terms:
                yield Rule(f"{times.stage.name}{WEAR}", written - pin.amount / GIB)


def _surcharged(lanes: Mapping[str, Linear]) -> Linear:
    """Seconds of a class's transfers, those of drives counted several times."""
    parts = lanes.items()
    return total([(DRIVES if lane in ("read", "write") else 1.0) * s for lane, s in parts])


def _waited_for(times: StageTimes) -> Linear:
    """Seconds of a class's recomputation in a pipeline with virtual stages.

    Its stages are the slowest in turn: the last one while its chunk has the loss, another one
    while that runs a lighter chunk. So recomputation is exposed in part, wherever there is time.
    """
    if not times.stage.interleaved:
        return Linear()
    return times.units * (times.backward_compute - times.plain_backward)


def _times(every: list[StageTimes], costs: Costs) -> Iterator[AtLeast]:
    """All time rows; each uses only times stated before it."""
    if every[0].stage.interleaved:
        yield from interleaved_rows(every)
        return
    for times in every:
        yield from pass_rows(times)
        yield from pair_rows(times)
        yield from hop_rows(times)
    # Seconds until a unit's first micro-batch has passed all stages. The last stage works on the
    # whole unit before its first backward.
    hops = [(times, len(times.stage.stages)) for times in every]
    through = leading_seconds(every[0]) + every[-1].forward_compute
    for times, stages in hops[:-1]:
        through += stages * (times.forward_hop() + costs.send)
    ends = trailing_seconds(every[0])
    after = total([n * (var(f"{t.stage.name}.H") + costs.send) for t, n in hops])
    entered, before_backward = 0.0, Linear()
    for times, stages in hops:
        # For the class's last stage, the earlier stages of the class come before it, too.
        name, hop = times.stage.name, times.forward_hop() + costs.send
        held = max(entered, leading_seconds(times))
        before_backward += (stages - 1) * (var(f"{name}.A") + costs.send)
        after += -stages * (var(f"{name}.H") + costs.send)
        yield from first_forward_rows(times, held + (stages - 1) * hop if stages > 1 else entered)
        first_alone = times.stage.stages[-1] == 0  # step_rows adds its other collectives
        last = last_reduction(times) if first_alone else ends
        yield from step_rows(times, through + after, before_backward + last)
        entered = held + stages * hop
        before_backward += var(f"{name}.A") + costs.send


def placement_of(graph: Graph, values: Mapping[str, float], rings: Rings = ROOMY) -> Placement:
    """The placement that a solution's values describe."""
    by_stage: dict[int, StagePlacement] = {}
    for stage in stage_classes(graph):
        kinds = {
            kind.name: _kind_placement(stage, kind, count, values) for kind, count in stage.kinds
        }
        by_stage.update({index: StagePlacement(kinds=kinds) for index in stage.stages})
    stages = tuple(by_stage[index] for index in sorted(by_stage))
    return Placement(stages=stages, **rings._asdict())


def _kind_placement(
    stage: StageClass, kind: LayerKind, count: int, values: Mapping[str, float]
) -> KindPlacement:
    """The kind's layers as the values have them, solver noise removed."""
    layers = {key: decision.at(values) for key, decision in stage.decisions(kind)}

    def whole(*tensor: str) -> dict[Tier, int]:
        return {tier: number for tier in Tier if (number := round(layers[*tensor, tier]))}

    parameters, gradients = whole("parameters"), whole("gradients")
    kept = ((recompute, whole("activations", recompute)) for recompute in Recompute)
    activations = {recompute: tiers for recompute, tiers in kept if tiers}
    if kind.frozen:
        return KindPlacement(layers=count, parameters=parameters, activations=activations)
    on_gpu = min(tiers.get(Tier.GPU, 0) for tiers in (parameters, gradients))
    share = {tier: max(0.0, layers["optimizer", tier]) for tier in Tier}
    share[Tier.GPU] = min(share[Tier.GPU], float(on_gpu))
    streamed = min(round(layers["streamed",], 6), round(share[Tier.HOST], 6))
    return KindPlacement(
        layers=count,
        parameters=parameters,
        gradients=gradients,
        activations=activations,
        optimizer=rounded(share, count),
        streamed=max(0.0, streamed) if layers["streamed",] > EXACT else 0.0,
    )


def rounded(layers: Mapping[Tier, float], count: int) -> dict[Tier, float]:
    """Shares that add up to `count` layers, solver noise below 1e-6 removed."""
    shares = {tier: round(value, 6) for tier, value in layers.items()}
    if shares[Tier.GPU] >= count:
        return {Tier.GPU: float(count)}
    larger = Tier.HOST if shares[Tier.HOST] >= shares[Tier.NVME] else Tier.NVME
    others = sum(value for tier, value in shares.items() if tier is not larger)
    shares[larger] = round(count - others, 6)
    return {tier: value for tier, value in shares.items() if value > 0}
