"""A strategy in words, for plans and messages."""

from __future__ import annotations

from bigplan.graph.strategy import Strategy
from bigplan.units import listed

DEGREES = (
    ("data parallel", "dp"),
    ("context parallel", "cp"),
    ("tensor parallel", "tp"),
    ("pipeline", "pp"),
    ("expert parallel", "ep"),
)


def strategy_text(strategy: Strategy) -> str:
    """Degrees of parallelism in words; degrees of 1 and what is off are left out."""
    degrees = [(name, getattr(strategy, field)) for name, field in DEGREES]
    parts = [f"{name} {degree}" for name, degree in degrees if degree > 1] or ["one GPU"]
    if strategy.vpp > 1:
        parts.append(f"{strategy.vpp} virtual stages each")
    if strategy.first_blocks or strategy.last_blocks:
        parts.append(_ends(strategy))
    if strategy.tp > 1 and not strategy.sequence_parallel:
        parts.append("no sequence parallelism")
    if strategy.zero:
        groups = f" in groups of {strategy.zero_group} GPUs" if strategy.zero_group else ""
        parts.append(f"ZeRO {strategy.zero}{groups}")
    sizes = [group.micro_batch for group in strategy.replicas] or [strategy.micro_batch]
    parts.append(f"micro-batch {listed([str(size) for size in sizes])}")
    if strategy.accumulation_group > 1:
        parts.append(f"{strategy.accumulation_group} micro-batches per layer visit")
    return ", ".join(parts)


def _ends(strategy: Strategy) -> str:
    """The number of blocks in the pipeline's first and last chunk, where it differs from others."""
    ends = (("first", strategy.first_blocks), ("last", strategy.last_blocks))
    return f"blocks in the {listed([f'{name} chunk {n}' for name, n in ends if n])}"
