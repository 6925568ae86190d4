"""Which model is planned on which machine, and for what, as options."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.cli.completion import known_clusters, known_models
from bigplan.cli.option import WHAT
from bigplan.cli.option import option_of as _option


@dataclass(frozen=True)
class WhatOptions:
    """Options that override an experiment's keys of model, machine and what is asked of a plan."""

    model: str | None = _option(
        "model",
        "Shipped name, model YAML, Hugging Face config.json, or the id of a cached one.",
        WHAT,
        "NAME",
        known=known_models,
    )
    cluster: str | None = _option(
        "cluster", "Shipped name or cluster YAML.", WHAT, "NAME", known=known_clusters
    )
    nodes: str | None = _option("nodes", "Number of nodes (default: the cluster's).", WHAT)
    engine: str | None = _option(
        "engine",
        "What executes it (default auto: the fastest that can here); any: the planner's best. "
        "Planned only, for `bigplan config`: fsdp2, accelerate, megatron, torchtitan, nemo.",
        WHAT,
        "auto|any|native|deepspeed|TOOL",
    )
    settings: list[str] | None = _option(
        "set", "Fix a decision, such as tp=8; repeatable.", WHAT, "KEY=VALUE"
    )
    caps: list[str] | None = _option(
        "caps",
        "Limit gpu (per GPU), host or nvme (per node), such as gpu=16GiB; repeatable.",
        WHAT,
        "TIER=SIZE",
        flag="--cap",
    )
    hardware: list[str] | None = _option(
        "hardware",
        "Plan for a node with another part, such as nvme.drives=4 or gpu=h200-sxm; repeatable.",
        WHAT,
        "KEY=VALUE",
    )
    prefer: str | None = _option(
        "prefer",
        "fastest (default), or cheapest: fewest dollars for the training; nodes may idle.",
        WHAT,
    )
    within: str | None = _option(
        "within",
        "Longest time for the whole training, such as '30 d'; needs --tokens.",
        WHAT,
        "TIME",
    )
    max_wear: str | None = _option(
        "max_wear",
        "Of the writes that drives are rated for, what the training may take, such as 0.1; "
        "needs --tokens or --steps.",
        WHAT,
        "SHARE",
    )
