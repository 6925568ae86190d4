"""Fit the cost model's constants to published training runs, and score it on sources left out.

    python benchmarks/fit_constants.py                        fit to all rows, print the constants
    python benchmarks/fit_constants.py --score                no fit: the shipped constants' errors
    python benchmarks/fit_constants.py --leave-out            refit without each source in turn

Wants SciPy: pip install 'bigplan[fit]'. A fit takes two to five minutes.

One set of constants per GPU generation, link, framework behaviour and physical effect; none per
row, table or site. The objective is the sum over rows of a soft absolute log ratio (squared below
3%, absolute above) plus a weak pull towards the start, minimised by SciPy's least squares within
what is physical. DeepSpeed's offload table (`ds`) takes no part in it; the other offload table
(`stas`), whose time is FlashAttention-3's, does.

The fit starts from the shipped constants. Those came from an earlier run of the same objective with
slightly other weights (V100 tables counted a little), so a new fit moves them by a few percent.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from bigplan.cost import compute
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
from bigplan.cost.run import Run, graph_of
from bigplan.cost.step import framework_step
from bigplan.graph.graph import Graph
from bigplan.spec.cluster import NodeGroup, find_gpu, find_link
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.machines import UnknownMachineError
from bigplan.validate.rows import Row, read_rows
from bigplan.validate.score import measured_seconds

pricing = sys.modules["bigplan.cost.price"]

GENERATIONS = {"A": "A100", "H": "H100", "B": r"B200", "C": r"B300", "V": "V100"}
GPUS = {
    "A": "a100-sxm4-80gb",
    "H": "h100-sxm-80gb",
    "B": "b200",
    "C": "b300",
    "V": "v100-sxm2-32gb",
}
LINKS = {"NVLink 3": "nvlink3", "4 links": "nvlink3-4-links", "Omni": "omni-path-4x100"}
NOMINAL = {"nvlink3": 300e9, "nvlink3-4-links": 100e9, "omni-path-4x100": 50e9}
SOFT = 0.03  # log ratio at which the penalty turns from squared to absolute
PULL = math.sqrt(4e-5) / 0.3  # a constant 35% above its start costs 4e-5
WEIGHTS = {"A": 1.0, "B": 0.5, "C": 0.0}
# Small tables would not be heard beside tables of a hundred rows. DeepSpeed's offload table is kept
# out: what prices it is measured or counted, not fitted.
TABLE_WEIGHTS = {
    "bsV100": 0.0,  # its source warns of 40% between allocations
    "bs1B3": 0.3,
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


# What one would assume without a source's rows for the constants that nothing else informs:
# another constant, or a value. So a source left out has no part in what predicts it.
UNINFORMED: dict[str, dict[str, str | float]] = {
    "bloom": {
        "omni-path-4x100 share": "network share",
        "nvlink3-4-links share": "nvlink3 share",
        "4 links half": "nvlink half",
        "misaligned": 0.25,  # 4-byte loads instead of 16
    },
    "mosaic": {"composer gather": 0.0, "composer backward": 1.0},  # as BACKWARD_POST is documented
    "torchtitan": {"500 W share": (500 / 700) ** (1 / 3), "async tensor": 0.5},  # power ~ clock^3
    "nvidia": {
        "core tensor": 0.5,
        "core reduce": 0.0,
        "B gemm": "H gemm",
        "B half k": "H half k",
        "B flash3": "H flash3",
        "C gemm": "H gemm",
        "C half k": "H half k",
        "C flash3": "H flash3",
    },
    "deepspeed offload": {"deepspeed host": "megatron host", "deepspeed hooks": 0.0},
    "V100": {"V gemm": "A gemm", "V half k": "A half k"},
}


@dataclass(frozen=True)
class Priced:
    """A row that can be priced: its run, its operators (no constant changes them), the truth."""

    row: Row
    run: Run
    graph: Graph
    seconds: float


def priced_rows() -> list[Priced]:
    """All rows that the model prices."""
    found = []
    for row in completed(read_rows()):
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
TOP = {"gemm": 0.97, "flash2": 0.97, "flash3": 0.75, "back2": 0.9, "back3": 0.9, "share": 0.97}


def shipped() -> Constants:
    """The constants as they are shipped."""
    start: Constants = {}
    for letter, name in GPUS.items():
        gpu = find_gpu(name)
        start[f"{letter} gemm"] = gpu.gemm_efficiency
        start[f"{letter} half k"] = gpu.gemm_half_k
        if letter in "AH":
            start[f"{letter} flash2"] = gpu.attention_forward_efficiency["flash2"]
        if letter in "HBC":
            start[f"{letter} flash3"] = gpu.attention_forward_efficiency["flash3"]
    h100 = find_gpu("h100-sxm-80gb")
    start["500 W share"] = find_gpu("h100-sxm-96gb-hbm2e").gemm_efficiency / h100.gemm_efficiency
    for which, kernel in (("back2", "flash2"), ("back3", "flash3")):
        forward, backward = h100.attention_forward_efficiency, h100.attention_backward_efficiency
        start[which] = backward[kernel] / forward[kernel]  # type: ignore[index]
    for name in LINKS.values():
        start[f"{name} share"] = find_link(name).bandwidth / NOMINAL[name]
    ib = find_link("infiniband-hdr-8x200")
    start["network share"] = ib.bandwidth / 200e9
    start["network latency"], start["network half"] = ib.latency, float(ib.half_size)
    nvlink = find_link("nvlink3")
    start["nvlink latency"], start["nvlink half"] = nvlink.latency, float(nvlink.half_size)
    start["4 links half"] = float(find_link("nvlink3-4-links").half_size)
    start |= {
        "head": compute.HEAD_OVERHEAD,
        "misaligned": compute.MISALIGNED,
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
        lambda f: f.tensor_exposed,
        lambda f, x: replace(f, tensor_exposed=min(1.0, x)),
    ),
    "core reduce": (
        MEGATRON_CORE,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, reduce_exposed=min(1.0, x)),
    ),
    "fsdp exposed": (
        FSDP,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, gather_exposed=x, regather_exposed=x, reduce_exposed=x),
    ),
    "async tensor": (
        FSDP,
        lambda f: f.tensor_exposed_async,
        lambda f, x: replace(f, tensor_exposed_async=min(1.0, x)),
    ),
    "composer gather": (
        COMPOSER,
        lambda f: f.gather_exposed,
        lambda f, x: replace(f, gather_exposed=min(1.0, x)),
    ),
    "composer backward": (
        COMPOSER,
        lambda f: f.reduce_exposed,
        lambda f, x: replace(f, regather_exposed=min(1.0, x), reduce_exposed=min(1.0, x)),
    ),
    "deepspeed host": (DEEPSPEED, lambda f: f.host, lambda f, x: replace(f, host=x)),
    "deepspeed hooks": (
        DEEPSPEED,
        lambda f: f.gather_launches,
        lambda f, x: replace(f, gather_launches=x),
    ),
}
FAMILY = {"Megatron-DeepSpeed": "Megatron-LM"}


def machine(nodes: NodeGroup, constants: Constants) -> NodeGroup:
    """The nodes with these constants."""
    gpu = nodes.gpu
    letter = next((k for k, p in GENERATIONS.items() if re.search(p, gpu.name)), "H")
    limit = constants["500 W share"] if "HBM2e" in gpu.name else 1.0
    forward = {
        kernel: limit * constants.get(f"{letter} {kernel}", constants[f"H {kernel}"])
        for kernel in gpu.attention_forward_efficiency
        if letter != "V" and kernel != "sdpa"
    } or dict(gpu.attention_forward_efficiency)
    backward = {k: v * constants["back2" if k == "flash2" else "back3"] for k, v in forward.items()}
    changed = gpu.model_copy(
        update={
            # The H200's products were measured; only its attention is fitted, with the H100's.
            **(
                {}
                if "H200" in gpu.name
                else {
                    "gemm_efficiency": limit * constants[f"{letter} gemm"],
                    "gemm_half_k": constants[f"{letter} half k"],
                }
            ),
            "attention_forward_efficiency": forward,
            "attention_backward_efficiency": backward,
        }
    )
    intra, inter = nodes.intra_node, nodes.inter_node
    if inter is not None:
        share = constants["omni-path-4x100 share"] * 50e9 if "Omni" in inter.name else None
        usual = find_link("infiniband-hdr-8x200").bandwidth / 200e9
        inter = inter.model_copy(
            update={
                "bandwidth": share or inter.bandwidth / usual * constants["network share"],
                "latency": constants["network latency"],
                "half_size": constants["network half"],
            }
        )
    for text, name in LINKS.items():
        if text in intra.name and name != "omni-path-4x100":
            intra = intra.model_copy(
                update={
                    "bandwidth": NOMINAL[name] * constants[f"{name} share"],
                    "latency": constants["nvlink latency"],
                    "half_size": constants["4 links half" if "4" in name else "nvlink half"],
                }
            )
    return nodes.model_copy(update={"gpu": changed, "intra_node": intra, "inter_node": inter})


def behaviour(run: Run, row: Row, constants: Constants) -> Framework:
    """The run's framework with these constants."""
    framework = run.framework
    family = FAMILY.get(framework.name, framework.name)
    for name, (of, _, change) in BEHAVIOUR.items():
        if of.name == family:
            framework = change(framework, constants[name])
    if row.async_tp:
        framework = replace(framework, tensor_exposed=framework.tensor_exposed_async)
    return framework


def ratios(rows: list[Priced], constants: Constants) -> np.ndarray:
    """Logarithms of predicted over measured."""
    compute.HEAD_OVERHEAD, compute.MISALIGNED = constants["head"], constants["misaligned"]
    pricing.OVERLAP_NORM = constants["overlap norm"]  # type: ignore[attr-defined]
    pricing.COLLECTIVE_LAUNCHES = constants["collective launches"]  # type: ignore[attr-defined]
    found = []
    for one in rows:
        nodes = machine(one.run.nodes, constants)
        framework = behaviour(one.run, one.row, constants)
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
    """Between which a constant is physical: a share is at most a whole."""
    top = next((top for kind, top in TOP.items() if name.endswith(kind)), math.inf)
    if name in BEHAVIOUR and "host" not in name and "hooks" not in name:
        top = 1.0
    return (0.0 if top == math.inf else 0.005), top


def fit(rows: list[Priced], source: str | None = None) -> Constants:
    """The constants that fit all rows, or all but a source's."""
    start, assumed = shipped(), UNINFORMED.get(source or "", {})
    names = [name for name in start if name not in assumed]
    counts = weights(rows, SOURCES.get(source or "", ()))

    def constants(factors: np.ndarray) -> Constants:
        at = start | {n: start[n] * float(f) for n, f in zip(names, factors, strict=True)}
        return at | {n: at[v] if isinstance(v, str) else v for n, v in assumed.items()}

    def residuals(factors: np.ndarray) -> np.ndarray:
        """Their squares add up to the objective."""
        wrong = ratios(rows, constants(factors)) / SOFT
        soft = np.sign(wrong) * SOFT * np.sqrt(2 * counts * (np.hypot(1, wrong) - 1))
        return np.concatenate([soft, PULL * np.log(factors)])

    within = np.array([limits(name) for name in names]).T / [start[name] for name in names]
    low, high = np.clip(within[0], 1e-3, 1.0), np.maximum(within[1], 1.0)
    found = least_squares(residuals, np.ones(len(names)), bounds=(low, high), diff_step=0.01)
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
    parser.add_argument("--leave-out", action="store_true")
    asked = parser.parse_args()
    rows = priced_rows()
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
