"""How fast a plan's step could be at most, at the rates that a machine was measured at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from bigplan.cost.rates import ADAM_BYTES
from bigplan.graph.graph import ElementSizes
from bigplan.plan import Plan
from bigplan.planner import programs_of
from bigplan.program import LINKS, Action, Buffer, Lane, Op, Program, counted
from bigplan.simulate import action_seconds
from bigplan.solve.candidate import Candidate
from bigplan.spec.cluster import NodeGroup

# Lanes of copies, with the link that both directions share.
BOTH = {
    "host to device": "pcie",
    "device to host": "pcie",
    "nvme read": "drive",
    "nvme write": "drive",
}
# Rings of chunks of optimizer state, with the lanes on which these come and go.
RINGS = {"stream": ("host to device", "device to host"), "stage.o": ("nvme read", "nvme write")}
HOST_MEMORY = "host memory"


def bound_of(plan: Plan) -> dict[str, Any]:
    """Seconds that this plan's step takes at least, what holds it there, and by which rates.

    A step takes at least what each resource has to do in it. Where updates wait for the norm of
    all gradients, they lie between the norm and the next backward, as does the first accumulation
    group's forward, and the GPU's other compute does not:

        T >= max_r work_r
        T >= (work_gpu - first) + max_r update_r     first = update_gpu: that forward, GPU updates

    `gpu` is what the plan has the GPU compute, recomputation included, at the profile's
    efficiencies, and so are collectives. All other rates are `best_rates`, where the GPUs of one
    machine have equal parts of what they share. Latencies are left out. Of a pipeline's stages the
    one with the largest bound is told; none waits for another in it.
    """
    candidate, programs = programs_of(plan)
    return max(
        (_stage_bound(plan, candidate, program) for program in programs),
        key=lambda bound: float(bound["seconds"]),
    )


def _stage_bound(plan: Plan, candidate: Candidate, program: Program) -> dict[str, Any]:
    graph, nodes = candidate.graph, plan.cluster.group
    rates = best_rates(nodes, graph.sizes, min(plan.strategy.ranks, nodes.gpus_per_node))
    step: dict[str, float] = defaultdict(float)
    update: dict[str, float] = defaultdict(float)
    for action, times in counted(program.step):
        if action.lane is Lane.COMPUTE:
            seconds = times * action_seconds(action, graph, candidate.costs)
            step["gpu"] += seconds
            if action.op is Op.FORWARD:
                update["gpu"] += seconds / graph.units
            elif action.op is Op.UPDATE:
                update["gpu"] += seconds
        elif action.lane is Lane.COMM:
            step["collectives"] += times * action_seconds(action, graph, candidate.costs)
        for resource, amount in used(action, graph.sizes):
            step[resource] += times * amount / rates[resource]
            if action.share is not None:  # the update's: its rows
                update[resource] += times * amount / rates[resource]
    found = dict(step)
    if graph.deferred:
        _leave_out_rings(update, program.buffers, rates)
        longest = max(update, key=lambda resource: update[resource])
        found[f"backward, then {longest}"] = step["gpu"] - update["gpu"] + update[longest]
    by = max(found, key=lambda name: found[name])
    return {"seconds": found[by], "by": by, "all": found, "rates": rates}


def _leave_out_rings(
    update: dict[str, float], buffers: Mapping[str, Buffer], rates: Mapping[str, float]
) -> None:
    """A ring's chunks may come before the norm is known, and go when the backward has begun."""
    for name, lanes in RINGS.items():
        if name in buffers:
            for lane in lanes:
                for resource in (lane, BOTH[lane], HOST_MEMORY):
                    less = buffers[name].total / rates[resource]
                    update[resource] = max(0.0, update[resource] - less)


def best_rates(nodes: NodeGroup, sizes: ElementSizes, gpus: int = 1) -> dict[str, float]:
    """The best that each resource reached in the profile: bytes, and elements updated, a second.

    For each of so many GPUs that use them at once.

    host to device, device to host, nvme read, nvme write    each alone
    pcie, drive     both directions together; the sum of both where that was not measured
    cpu             `adam_rate`, alone; by bytes where the optimizer is not fp32 AdamW
    gpu update      the same of the GPU
    host memory     the most of: a sum by all threads, AdamW alone at 30 bytes an element, AdamW
                    beside copies and these copies. All others use it, so what they cannot reach at
                    the same time is counted here
    """
    host, pcie, nvme = nodes.host, nodes.pcie, nodes.nvme
    part = sizes.update_bytes / ADAM_BYTES
    beside = ADAM_BYTES * (host.adam_rate_beside_copies or 0.0)
    beside += 2 * (pcie.node_host_to_device_beside_update or 0.0)  # as much leaves as comes
    there = min(pcie.host_to_device, pcie.node_host_to_device / gpus)
    back = min(pcie.device_to_host, pcie.node_device_to_host / gpus)
    rates = {
        "host to device": there,
        "device to host": back,
        "pcie": min(pcie.both_ways or there + back, there + back),
        "cpu": host.adam_rate / part / gpus,
        "gpu update": nodes.gpu.adam_rate / part,
        HOST_MEMORY: max(host.memory_bandwidth, ADAM_BYTES * host.adam_rate, beside) / gpus,
    }
    if nvme is not None:
        both = nvme.both_ways * nvme.drives if nvme.both_ways else nvme.node_read + nvme.node_write
        drives = {"nvme read": nvme.node_read, "nvme write": nvme.node_write, "drive": both}
        rates |= {name: rate / gpus for name, rate in drives.items()}
    return rates


def used(action: Action, sizes: ElementSizes) -> Iterator[tuple[str, int]]:
    """What an action takes of the resources of `best_rates`, in bytes or elements.

    In host memory, the CPU's update reads and writes state, reads gradients and writes parameters;
    a sum reads two and writes one.
    """
    lane = str(LINKS.get(action.lane, action.lane))
    if lane in BOTH:
        yield from ((name, action.amount) for name in (lane, BOTH[lane], HOST_MEMORY))
    elif action.lane is Lane.GPU_UPDATE:
        yield "gpu update", action.amount
    elif action.lane is Lane.CPU:
        each = {Op.UPDATE: 2 * sizes.state + sizes.gradient + sizes.parameter, Op.ACCUMULATE: 3}
        yield HOST_MEMORY, action.amount * each.get(action.op, 1)
        if action.op is Op.UPDATE:
            yield "cpu", action.amount
