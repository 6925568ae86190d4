"""Fit the frameworks' constants to published training runs, and score them on sources left out.

    python benchmarks/fit_constants.py                        fit to all rows, print the constants
    python benchmarks/fit_constants.py --score [ROWS.csv]     no fit: the shipped constants' errors
    python benchmarks/fit_constants.py --leave-out            refit without each source in turn

Wants SciPy: pip install 'bigplan[fit]'. A fit takes about a minute, all of --leave-out ten.

What a GPU can do comes from measured and published kernels (bigplan/hardware), not from here, but
for two of which no kernel table was found: GB200 and GB300. Fitted is what a framework makes of a
GPU: one set of constants per framework behaviour, link and physical effect; none per row, table or
site. The objective is the sum over rows of a soft absolute log ratio
(squared below 3%, absolute above) plus a weak pull towards the start, minimised by SciPy's least
squares within what is physical. Left out of it: DeepSpeed's offload table (`ds`), and V100s, whose
tables warn of their noise. The fit starts from the shipped constants.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from bigplan.cost.band import error_class
from bigplan.cost.framework import (
    COMPOSER,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MEGATRON_CORE,
    Framework,
)
from bigplan.cost.price import price
from bigplan.cost.run import PricedRun, graph_of
from bigplan.cost.step import framework_step
from bigplan.graph.graph import Graph
from bigplan.spec.cluster import NodeGroup
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.machines import UnknownMachineError, find_gpu, find_link, find_network
from bigplan.validate.rows import PublishedRow, read_rows
from bigplan.validate.score import measured_seconds

pricing = sys.modules["bigplan.cost.price"]

# GPUs without a kernel table, by what their names hold: the constant, and the shipped description.
GPUS = {"GB200": "gb200", "B300": "gb300"}
LINKS = {"NVLink 3": "nvlink3", "4 links": "nvlink3-4-links"}
NOMINAL = {"nvlink3": 300e9, "nvlink3-4-links": 100e9, "omni-path-4x100": 50e9}
SOFT = 0.03  # log ratio at which the penalty turns from squared to absolute
PULL = math.sqrt(4e-5) / 0.3  # a constant 35% above its start costs 4e-5
WEIGHTS = {"A": 1.0, "B": 0.5, "C": 0.0}
# Small tables would not be heard beside tables of a hundred rows. DeepSpeed's offload table is kept
# out: what prices it is measured or counted, not fitted. So are three tables that check the rest.
TABLE_WEIGHTS = {
    "llmq": 0.0,
    "sailor": 0.0,
    "simumax": 0.0,
    "bsV100": 0.0,  # its source warns of 40% between allocations
    "bs1B3": 0.0,
    "qwen": 0.5,
    "vtrainS": 2.0,
    "seqsel": 4.0,
    "fms": 1.5,
    "megTP": 1.5,
    "mosaic": 0.75,
    "bloomA100": 0.75,
}
SOURCES = {
    "mosaic": ("mosaic",),
    "bloom": ("bloomA100",),
    "vtrain": ("vtrainM", "vtrainS"),
    "megatron tables": ("megTP", "seqsel"),
    "torchtitan": ("titan",),
    "fms": ("fms",),
    "nvidia": ("nemo", "mbridge"),
    "deepspeed offload": ("ds", "stas"),
    "V100": ("bsV100", "bs1B3"),
}


# NVLink 3 is kept where it is: fits wander to 0.92 of nominal, above what NCCL's own tests reach.
MEASURED = ("nvlink3 share",)

# What one would assume without a source's rows for the constants that nothing else informs:
# another constant, or a value. So a source left out has no part in what predicts it.
UNINFORMED: dict[str, dict[str, str | float]] = {
    "bloom": {
        "omni-path-4x100 share": "network share",
        "nvlink3-4-links share": "nvlink3 share",
        "4 links half": "nvlink half",
    },
    "mosaic": {
        "composer gather": 0.0,  # as BACKWARD_POST is documented
        "composer backward": 1.0,
        "composer eager": 0.5,
        "composer gemm": "fsdp gemm",
    },
    "torchtitan": {"async tensor": 0.5},
    "nvidia": {
        "core tensor": 0.5,
        "core reduce": 0.0,
        "core gemm": "megatron gemm",
        "GB200 gemm": 0.77,  # the H200's
        "B300 gemm": 0.77,
    },
    "deepspeed offload": {"deepspeed host": "megatron host"},
    "V100": {},
}


@dataclass(frozen=True)
class Priced:
    """A row that can be priced: its run, its operators (no constant changes them), the truth."""

    row: PublishedRow
    run: PricedRun
    graph: Graph
    seconds: float


def priced_rows(path: Path | None = None) -> list[Priced]:
    """All rows that the model prices: the shipped ones, or a file's."""
    found = []
    for row in completed(read_rows(path)):
        try:
            run = run_of(row)
        except (SkippedError, UnknownMachineError):
            continue
        graph = graph_of(run)
        seconds = measured_seconds(row, run, graph)
        if seconds is not None:
            found.append(Priced(row, run, graph, seconds))
    return found


Constants = dict[str, float]
TOP = {"gemm": 1.0, "share": 1.0, "eager": 1.0}


def shipped() -> Constants:
    """The constants as they are shipped."""
    start = {f"{text} gemm": find_gpu(name).gemm_efficiency for text, name in GPUS.items()}
    for name in LINKS.values():
        start[f"{name} share"] = find_link(name).bandwidth / NOMINAL[name]
    omni = find_network("omni-path-4x100")
    start["omni-path-4x100 share"] = omni.bandwidth / NOMINAL["omni-path-4x100"]
    ib = find_network("infiniband-hdr-8x200")
    start["network share"] = ib.bandwidth / 200e9
    start["network latency"], start["network half"] = ib.latency, float(ib.half_size)
    nvlink = find_link("nvlink3")
    start["nvlink latency"], start["nvlink half"] = nvlink.latency, float(nvlink.half_size)
    start["4 links half"] = float(find_link("nvlink3-4-links").half_size)
    start |= {
        "overlap norm": pricing.OVERLAP_NORM,
        "collective launches": pricing.COLLECTIVE_LAUNCHES,
    }
    return start | {name: get(f) for name, (f, get, _) in BEHAVIOUR.items()}


# Name: framework, how to read the constant, how to set it.
Get = Callable[[Framework], float]
Set = Callable[[Framework, float], Framework]
BEHAVIOUR: dict[str, tuple[Framework, Get, Set]] = {
    "megatron host": (MEGATRON, lambda f: f.host, lambda f, x: replace(f, host=x)),
    "core tensor": (
        MEGATRON_CORE,
        lambda f: f.tensor_exposed_async,
        lambda f, x: replace(f, tensor_exposed_async=x),
    ),
    "core reduce": (
        MEGATRON_CORE,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, reduce_exposed=x),
    ),
    "fsdp exposed": (
        FSDP,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, gather_exposed=x, regather_exposed=x, reduce_exposed=x),
    ),
    "async tensor": (
        FSDP,
        lambda f: f.tensor_exposed_async,
        lambda f, x: replace(f, tensor_exposed_async=x),
    ),
    "composer eager": (COMPOSER, lambda f: f.eager, lambda f, x: replace(f, eager=x)),
    "composer gather": (
        COMPOSER,
        lambda f: f.gather_exposed,
        lambda f, x: replace(f, gather_exposed=x),
    ),
    "composer backward": (
        COMPOSER,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, regather_exposed=x, reduce_exposed=x),
    ),
    "deepspeed host": (DEEPSPEED, lambda f: f.host, lambda f, x: replace(f, host=x)),
} | {
    f"{name} gemm": (f, lambda f: f.gemm_share, lambda f, x: replace(f, gemm_share=x))
    for name, f in (
        ("megatron", MEGATRON),
        ("core", MEGATRON_CORE),
        ("fsdp", FSDP),
        ("composer", COMPOSER),
    )
}
FAMILY = {"Megatron-DeepSpeed": "Megatron-LM"}


def machine(nodes: NodeGroup, constants: Constants) -> NodeGroup:
    """The nodes with these constants."""
    gpu = nodes.gpu
    for text in GPUS:
        if text in gpu.name:
            gpu = gpu.model_copy(update={"gemm_efficiency": constants[f"{text} gemm"]})
    intra, inter = nodes.intra_node, nodes.inter_node
    if inter is not None:
        share = (
            constants["omni-path-4x100 share"] * NOMINAL["omni-path-4x100"]
            if "Omni" in inter.name
            else None
        )
        usual = find_network("infiniband-hdr-8x200").bandwidth / 200e9
        inter = inter.model_copy(
            update={
                "bandwidth": share or inter.bandwidth / usual * constants["network share"],
                "latency": constants["network latency"],
                "half_size": constants["network half"],
            }
        )
    for text, name in LINKS.items():
        if text in intra.name:
            intra = intra.model_copy(
                update={
                    "bandwidth": NOMINAL[name] * constants[f"{name} share"],
                    "latency": constants["nvlink latency"],
                    "half_size": constants["4 links half" if "4" in name else "nvlink half"],
                }
            )
    return nodes.model_copy(update={"gpu": gpu, "intra_node": intra, "inter_node": inter})


def behaviour(run: PricedRun, constants: Constants) -> Framework:
    """The run's framework with these constants; what the row itself says of it stays."""
    framework = run.framework
    family = FAMILY.get(framework.name, framework.name)
    asynchronous = framework.tensor_exposed == framework.tensor_exposed_async
    for name, (of, get, change) in BEHAVIOUR.items():
        if of.name == family and get(framework) == get(of):
            framework = change(framework, constants[name])
    if asynchronous:
        framework = replace(framework, tensor_exposed=framework.tensor_exposed_async)
    return framework


def ratios(rows: list[Priced], constants: Constants) -> np.ndarray:
    """Logarithms of predicted over measured."""
    pricing.OVERLAP_NORM = constants["overlap norm"]  # type: ignore[attr-defined]
    pricing.COLLECTIVE_LAUNCHES = constants["collective launches"]  # type: ignore[attr-defined]
    found = []
    for one in rows:
        nodes = machine(one.run.nodes, constants)
        framework = behaviour(one.run, constants)
        costs = price(one.graph, one.run.training, nodes, framework)
        parts = framework_step(one.graph, costs, nodes, framework, one.run.execution)
        found.append(math.log(sum(parts.values()) / one.seconds))
    return np.array(found)


def weights(rows: list[Priced], left_out: tuple[str, ...]) -> np.ndarray:
    """How much each row counts."""

    def weight(one: Priced) -> float:
        row = one.row
        if row.group in left_out or (one.run.execution.cpu_update and row.group == "ds"):
            return 0.0
        return WEIGHTS[row.trust] * TABLE_WEIGHTS.get(row.group, 1.0)

    return np.array([weight(one) for one in rows])


def limits(name: str) -> tuple[float, float]:
    """Between which a constant is physical: a share is at most a whole, overlaps at most a sum."""
    if name == "overlap norm":
        return 1.0, math.inf
    top = next((top for kind, top in TOP.items() if name.endswith(kind)), math.inf)
    if name in BEHAVIOUR and "host" not in name and "hooks" not in name:
        top = 1.0
    return (0.0 if top == math.inf else 0.005), top


def _touched(rows: list[Priced], start: Constants, name: str) -> list[int]:
    """The rows that a constant has a part in: they change where it is less or more by half."""
    found = ratios(rows, start | {name: 0.5 * start[name]}) != ratios(rows, start)
    return [int(i) for i in found.nonzero()[0]]


def fit(rows: list[Priced], source: str | None = None) -> Constants:
    """The constants that fit all rows, or all but a source's."""
    start, assumed = shipped(), UNINFORMED.get(source or "", {})
    names = [name for name in start if name not in assumed and name not in MEASURED]
    counts = weights(rows, SOURCES.get(source or "", ()))
    rows = [one for one, count in zip(rows, counts, strict=True) if count]
    counts = counts[counts > 0]

    def constants(factors: np.ndarray) -> Constants:
        at = start | {n: start[n] * float(f) for n, f in zip(names, factors, strict=True)}
        return at | {n: at[v] if isinstance(v, str) else v for n, v in assumed.items()}

    def soft(wrong: np.ndarray) -> np.ndarray:
        wrong = wrong / SOFT
        return np.sign(wrong) * SOFT * np.sqrt(2 * counts * (np.hypot(1, wrong) - 1))

    def residuals(factors: np.ndarray) -> np.ndarray:
        """Their squares add up to the objective."""
        return np.concatenate([soft(ratios(rows, constants(factors))), PULL * np.log(factors)])

    touched = {name: _touched(rows, start, name) for name in names}

    def jacobian(factors: np.ndarray) -> np.ndarray:
        """By differences; a constant changes few rows."""
        at = ratios(rows, constants(factors))
        columns = []
        for i, name in enumerate(names):
            some = touched[name]
            beside = factors.copy()
            step = -0.01 if factors[i] * 1.01 > high[i] else 0.01
            beside[i] *= 1 + step
            moved = at.copy()
            moved[some] = ratios([rows[j] for j in some], constants(beside))
            columns.append((soft(moved) - soft(at)) / (beside[i] - factors[i]))
        return np.vstack([np.array(columns).T, np.diag(PULL / factors)])

    within = np.array([limits(name) for name in names]).T / [start[name] for name in names]
    low, high = np.clip(within[0], 1e-3, 1.0), np.maximum(within[1], 1.0)
    found = least_squares(residuals, np.ones(len(names)), jacobian, (low, high), ftol=1e-5)
    return constants(found.x)


def report(rows: list[Priced], found: np.ndarray, title: str) -> None:
    """Errors by table and trust."""
    print(title)
    tables = defaultdict(list)
    for one, ratio in zip(rows, found, strict=True):
        error = math.exp(ratio) - 1
        tables[f"{one.row.group} ({one.row.trust})"].append(error)
        if one.row.trust == "A":
            tables["all of trust A"].append(error)
    print(f"  {'table':24s} {'rows':>5s} {'MAPE':>7s} {'median':>7s} {'80% in':>7s} {'bias':>7s}")
    for name, errors in sorted(tables.items()):
        sizes = np.abs(errors)
        print(
            f"  {name:24s} {len(errors):5d} {100 * sizes.mean():6.2f}% "
            f"{100 * np.median(sizes):6.2f}% {100 * np.quantile(sizes, 0.8):6.2f}% "
            f"{100 * np.mean(errors):+6.2f}%"
        )


def shortest(values: list[float], share: float) -> tuple[float, float]:
    """The shortest interval that holds at least this share of the values."""
    ordered = sorted(values)
    count = math.ceil(share * len(ordered))
    starts = range(len(ordered) - count + 1)
    start = min(starts, key=lambda i: ordered[i + count - 1] - ordered[i])
    return ordered[start], ordered[start + count - 1]


def main() -> None:
    """Fit or score, as asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true")
    parser.add_argument(
        "rows", nargs="?", type=Path, help="a file to score in place of the shipped"
    )
    parser.add_argument("--leave-out", action="store_true")
    asked = parser.parse_args()
    rows = priced_rows(asked.rows)
    if asked.score:
        report(rows, ratios(rows, shipped()), "shipped constants")
        return
    if not asked.leave_out:
        constants = fit(rows)
        report(rows, ratios(rows, constants), "fitted to all rows")
        print(json.dumps({n: float(f"{v:.4g}") for n, v in constants.items()}, indent=1))
        return
    classes: dict[str, list[float]] = defaultdict(list)
    for source, tables in SOURCES.items():
        found = ratios(rows, fit(rows, source))
        held = [i for i, one in enumerate(rows) if one.row.group in tables]
        report([rows[i] for i in held], found[held], f"left out: {source}")
        sys.stdout.flush()
        for i in held:
            if rows[i].row.trust != "C":
                run = rows[i].run
                kind = error_class(run.nodes.gpu.name, offloads=run.execution.cpu_update)
                classes[kind].append(float(found[i]))
    print(
        "error bands: class, rows, 80% of predicted over measured: shortest interval, equal tails"
    )
    for name, logs in classes.items():
        low, high = np.exp(shortest(logs, 0.8))
        tails = np.exp(np.quantile(logs, [0.1, 0.9]))
        print(
            f"  {name:24s} {len(logs):5d} {low:6.3f} {high:6.3f}  {tails[0]:6.3f} {tails[1]:6.3f}"
        )


if __name__ == "__main__":
    main()
