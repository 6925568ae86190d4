"""What other dimensions of a model would save: those that fill tiles, loads and kernels' heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bigplan.cost import price
from bigplan.graph.strategy import Cut, Strategy
from bigplan.graph.strategy_space import balanced_ends
from bigplan.plan import Plan, graph_of
from bigplan.report.operators import OperatorRow
from bigplan.report.text import seconds_text

# Head widths for which FlashAttention-2 has kernels (HEADDIM_SWITCH in its static_switch.h). Other
# widths are padded with zeros to the next wider kernel.
FLASH_HEADS = (32, 64, 96, 128, 192, 256)
SPLIT = ("vocab", "ffn")  # dimensions that tensor parallelism splits
WHY = {
    "vocab": "as it is, the LM head's products waste tiles or load narrowly",
    "ffn": "as it is, the MLP's products waste tiles or load narrowly",
    "hidden": "as it is, every product of a block wastes tiles or loads narrowly",
    "head_dim": "as it is, attention is slower than its arithmetic asks",
}
# Multiples to which dimensions are rounded: one load of 16-bit elements, and half, whole and double
# tiles. The vocabulary is padded at least to half tiles, because unused rows cost next to nothing
# (Megatron-LM: 128 x tensor parallel).
MULTIPLES = (8, 64, 128, 256)
VOCABULARY_MULTIPLES = (64, 128)
LARGER = 1.1  # times: a dimension rounded up by more makes another model
WORTH = 0.005  # of the time of forward and backward: a smaller gain is within the model's error


def shape_advice(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[tuple[str, float, str]]:
    """A dimension, the share of the step that another width saves, and the words."""
    yield from _roundings_told(plan, rows)
    yield from _head_dim(plan, rows)


def _roundings_told(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[tuple[str, float, str]]:
    on_layers = sum(row.seconds for row in rows if row.of_layers) / one_pass(plan).seconds
    for found in roundings(plan):
        share = min(1.0, on_layers * found.seconds / plan.predicted.step_seconds)
        yield found.dimension, found.gain * share, _rounding_text(plan, found, share)


def _rounding_text(plan: Plan, found: Rounding, share: float) -> str:
    saved = found.gain * share * plan.predicted.step_seconds
    tp = plan.strategy.tp
    split = f" (for tensor parallel {tp})" if tp > 1 and found.dimension in SPLIT else ""
    multiple = f"{found.rounded}, a multiple of {found.multiple}{split}"
    gain = f"about {seconds_text(saved)} a step ({found.gain * share:.1%})"
    if found.dimension == "vocab":
        return f"Pad the vocabulary from {found.value} to {multiple}: {WHY['vocab']}; saves {gain}."
    return (
        f"Make {found.dimension} {multiple}, instead of {found.value}: {WHY[found.dimension]}; "
        f"saves {gain} for the same arithmetic."
    )


def _head_dim(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[tuple[str, float, str]]:
    width = plan.model.head_dim
    padded = next((known for known in FLASH_HEADS if known >= width), width)
    # Fused attention is the only operator with FLOPs that is no matrix product in tiles.
    fused = sum(row.seconds for row in rows if row.flops and row.tile_lost is None)
    share = fused / plan.strategy.pp / plan.predicted.step_seconds
    gain = share * (1 - width / padded)
    if gain > WORTH and plan.cluster.group.gpu.runs_kernels:
        yield (
            "head_dim",
            gain,
            f"head_dim {width} is computed as {padded} by fused attention kernels: "
            f"{1 - width / padded:.0%} of attention's {share:.0%} of the step is for nothing. "
            f"Fewer heads of {padded} cost the same time.",
        )


@dataclass(frozen=True)
class Rounding:
    """A dimension rounded up. Seconds are those of the busiest stage's forward and backward, once.

    `gain` is the share of the time per FLOP that rounding saves. For the vocabulary it is the share
    of the time, because words that do not exist are of no use.
    """

    dimension: str
    value: int
    rounded: int
    multiple: int
    seconds: float
    rounded_seconds: float
    gain: float


def roundings(plan: Plan) -> Iterator[Rounding]:
    """For each dimension worth rounding, the smallest multiple with nearly the largest gain."""
    before = one_pass(plan)
    # Tensor parallelism splits neither the width of a head nor hidden.
    splits = {"vocab": plan.strategy.tp, "ffn": plan.strategy.tp, "hidden": 1, "head_dim": 1}
    for dimension, split in splits.items():
        value = getattr(plan.model, dimension)
        known = VOCABULARY_MULTIPLES if dimension == "vocab" else MULTIPLES
        multiples = [n * split for n in known]
        tried = [
            _rounding(plan, before, dimension, multiple)
            for multiple in multiples
            if value % multiple and _up(value, multiple) <= LARGER * value
        ]
        best = max((found.gain for found in tried), default=0.0)
        if best > WORTH:
            yield next(found for found in tried if found.gain > best - WORTH)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _rounding(plan: Plan, before: Pass, dimension: str, multiple: int) -> Rounding:
    value = getattr(plan.model, dimension)
    rounded = _up(value, multiple)
    model = plan.model.model_copy(update={dimension: rounded})
    after = one_pass(plan.model_copy(update={"model": model}))
    now, then = (each.busiest(plan.strategy) for each in (before, after))
    same = 1.0 if dimension == "vocab" else before.flops / after.flops
    return Rounding(dimension, value, rounded, multiple, now, then, 1 - same * then / now)


@dataclass(frozen=True)
class Pass:
    """Forward and backward of all layers, for one micro-batch."""

    parts: tuple[float, ...]
    """seconds of each block, first to last; with the first and the last what stands beside them"""
    flops: float

    @property
    def seconds(self) -> float:
        """Of all layers."""
        return sum(self.parts)

    def busiest(self, strategy: Strategy) -> float:
        """Seconds of the busiest stage, with blocks cut as they are or as suits their seconds.

        Virtual stages stay as they are: cut by chunks, they suit stages no better.
        """
        cuts = [strategy.cut]
        if strategy.pp > 1 and strategy.vpp == 1:
            block = self.parts[len(self.parts) // 2]
            ends = self.parts[0] / block - 1, self.parts[-1] / block - 1
            blocks, chunks = len(self.parts), strategy.pp
            cuts.append(Cut(chunks, *balanced_ends(blocks, chunks, ends)))
        return min(max(self._stages(cut, strategy.pp)) for cut in cuts)

    def _stages(self, cut: Cut, stages: int) -> list[float]:
        """Seconds of each stage, which has every `stages`-th chunk."""
        ends = accumulate(cut.blocks(len(self.parts)), initial=0)
        chunks = [sum(self.parts[first:last]) for first, last in pairwise(ends)]
        return [sum(chunks[stage::stages]) for stage in range(stages)]


def one_pass(plan: Plan) -> Pass:
    """That of the plan, as its blocks are launched."""
    graph = graph_of(plan)
    costs = price(graph, plan.training, plan.cluster.group)
    if not plan.placement.captured:
        costs = costs.launched()
    seconds: list[float] = []
    beside = flops = 0.0
    for name in graph.layers:
        kind, cost = graph.kinds[name], costs.kinds[name]
        beside += cost.forward + cost.backward
        if kind.stores_activations:
            seconds.append(beside)
            beside = 0.0
        operators = (*kind.forward, *kind.backward)
        flops += sum(getattr(operator, "flops", 0.0) for operator in operators)
    seconds[-1] += beside
    return Pass(tuple(seconds), flops)
