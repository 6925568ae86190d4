"""The constants that are fitted: as they are shipped, their limits, and rows priced with others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fit_rows import Priced
from bigplan.cost.framework import (
    COMPOSER,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MEGATRON_CORE,
    Framework,
)
from bigplan.cost.price import price
from bigplan.cost.run import PricedRun
from bigplan.cost.step import framework_step
from bigplan.spec.cluster import NodeGroup
from bigplan.validate.machines import find_gpu, find_link, find_network

pricing = sys.modules["bigplan.cost.price"]

# GPUs without a kernel table, by what their names hold: the constant, and the shipped description.
GPUS = {"GB200": "gb200", "B300": "gb300"}
LINKS = {"NVLink 3": "nvlink3", "4 links": "nvlink3-4-links"}
NOMINAL = {"nvlink3": 300e9, "nvlink3-4-links": 100e9, "omni-path-4x100": 50e9}
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


def limits(name: str) -> tuple[float, float]:
    """Between which a constant is physical: a share is at most a whole, overlaps at most a sum."""
    if name == "overlap norm":
        return 1.0, math.inf
    top = next((top for kind, top in TOP.items() if name.endswith(kind)), math.inf)
    if name in BEHAVIOUR and "host" not in name and "hooks" not in name:
        top = 1.0
    return (0.0 if top == math.inf else 0.005), top
