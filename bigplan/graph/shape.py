"""The sizes of one rank's operators and tensors, and what all layers take from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigplan.graph.activations import BlockShape, boundary_bytes
from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Stream
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import (
    groups_in_one,
    repeats_heads,
    sums_in_products,
    worth_apart,
)
from bigplan.spec.gpu import Gpu
from bigplan.spec.lora import adapted_steps, stored
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import sharing_scales
from bigplan.spec.step import LayerStep, Parameter, StepOp
from bigplan.spec.training import Training

WIDE = 8  # elements of 16 bits that a kernel loads at once


@dataclass(frozen=True, slots=True)
class RankShape:
    """The sizes that decide every operator of one micro-batch on one rank."""

    model: ModelSpec
    training: Training
    strategy: Strategy
    context_parallel: int = 1  # of other tools, whose exchanges are not priced; not `strategy.cp`
    fused: bool = False  # native runtime on CUDA: products add to sums, rows are looked up
    multiprocessors: int = 1  # of a GPU
    grouped: bool = False  # the GPU has kernels of grouped products
    narrow: bool = False  # the GPU has a flash kernel for values narrower than keys
    # Experts as Megatron Core has them: whole ones on each rank, `strategy.ep` ranks have them all.
    # Tensor-parallel ranks route their own tokens, and rows go to where their experts are.
    dispatched: bool = False
    sends_once: bool = False  # these: a token goes once to each rank with any of its experts
    pads_rows: bool = False  # and rows are padded for 8 bits apart
    cast_once: bool = False  # another tool's runtime, whose kernels know scales of 8 bits before
    looks_first: bool = False  # these do not: a tensor's largest value is looked for (Hopper)
    # Adapters and 4 bits as in plain_adapters.py: each matrix's apart, or a product's joined.
    plain_adapters: Literal["", "apart", "joined"] = ""

    @classmethod
    def on(cls, gpu: Gpu, model: ModelSpec, training: Training, strategy: Strategy) -> RankShape:
        """As the native runtime runs it on this GPU."""
        return cls(
            model, training, strategy, fused=gpu.runs_kernels,
            multiprocessors=gpu.multiprocessors,
            grouped=gpu.grouped_eight_bits if training.fp8_gemms else gpu.grouped_products,
            narrow=gpu.narrow_values,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.strategy.rank_tokens(self.training) // self.context_parallel

    @property
    def drops_adapters(self) -> bool:
        """Whether inputs of adapters pass a dropout."""
        return self.training.lora is not None and self.training.lora.dropout > 0

    @property
    def scaled(self) -> int:
        """Elements whose moments share a scale."""
        return sharing_scales(self.training.optimizer.moments)

    @property
    def element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return self.training.compute_bytes

    @property
    def generated(self) -> bool:
        """Whether norms, activation and loss are kernels without temporaries of their own."""
        return self.fused and self.training.kernels == "generated"

    @property
    def sums_in_products(self) -> bool:
        """Whether the native runtime's products add matrices' gradients to the sums themselves."""
        return self.fused and sums_in_products(self.training.gradient_bytes)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.strategy.tp

    @property
    def cp(self) -> int:
        """Context-parallel ranks that exchange tokens for heads around attention."""
        return self.strategy.cp

    @property
    def heads(self) -> int:
        """Heads of queries that a rank has within attention."""
        return -(-self.model.heads // self.tp) // self.cp

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values that a rank has within attention."""
        return max(1, -(-self.model.kv_heads // self.tp) // self.cp)

    @property
    def mixed_tokens(self) -> int:
        """Tokens that a rank has within attention: those of whole sequences, natively."""
        return self.tokens * self.cp

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split over the tensor-parallel ranks."""
        return self.tp > 1 and self.strategy.sequence_parallel

    @property
    def whole_hidden(self) -> int:
        """Bytes of a hidden state [tokens, hidden]: what a collective moves."""
        return boundary_bytes(self.model, self.tokens, self.element)

    @property
    def read_by_experts(self) -> int:
        """Bytes of what experts, or an MLP, read of all tokens, before there are rows of it."""
        return self.tokens * self.model.expert_width * self.element

    @property
    def routed(self) -> int:
        """Tokens of a micro-batch that a rank routes."""
        return self.tokens // (self.tp if self.dispatched else 1)

    @property
    def experts(self) -> int:
        """Experts of a block that a rank has, whole or a part of each."""
        return self.model.experts // self.strategy.ep

    @property
    def spreads_experts(self) -> bool:
        """Whether the native runtime's ranks have some of the experts, and send each other rows.

        Tensor-parallel ranks have their columns of the same experts, and send all tokens each.
        """
        return not self.dispatched and self.experts < self.model.experts

    @property
    def hidden(self) -> int:
        """Bytes of the part of a hidden state that a rank keeps and norms."""
        return self.whole_hidden // (self.tp if self.sequence_parallel else 1)

    @property
    def gathered(self) -> int:
        """Bytes of a hidden state after a gather, where ranks hold parts of it."""
        return self.whole_hidden if self.sequence_parallel else 0

    @property
    def frozen(self) -> bool:
        """Whether adapters alone are trained."""
        return self.training.lora is not None

    def every_step(self, kind: str) -> tuple[LayerStep, ...]:
        """What one layer of a kind does, with adapters."""
        return adapted_steps(self.model, kind, self.training.lora)

    def steps(self, op: StepOp) -> tuple[LayerStep, ...]:
        """The block's steps with this op."""
        return tuple(step for step in self.every_step("block") if step.op is op)

    @property
    def activation_shape(self) -> BlockShape:
        """The sizes that activations.py needs."""
        return BlockShape(
            tokens=self.tokens,
            sequence_length=self.tokens // self.strategy.micro_batch,
            element_size=self.element,
            tensor_parallel=self.tp,
            exchanging=self.cp,
            sequence_parallel=self.sequence_parallel,
            routes_own=self.dispatched,
            expanded_kv=repeats_heads(self.element, self.model.heads, self.model.kv_heads),
            materialised=self.training.attention == "materialised",
            dropout=self.training.dropout > 0,
            lora=self.training.lora,
        )

    def tokens_of(self, product: LayerStep) -> int:
        """Tokens of which a rank computes a block's product: its own, if it has whole matrices."""
        alone = all(p.split == "replicated" for p in product.parameters)
        if any(value.whole for value in product.gives):  # scores of a router
            return self.routed
        return self.tokens // (self.tp if alone and self.sequence_parallel else 1)


def local_tensor(parameter: Parameter, tp: int) -> Tensor:
    """A parameter as one tensor-parallel rank holds it, vocabulary rows padded up."""
    holders = parameter.holders(tp)
    return Tensor(parameter.name, *parameter.local(tp), holders, parameter.experts)


def _some_experts(parameter: Parameter, tp: int, ep: int) -> Tensor:
    """A parameter of experts as a rank holds it of `ep` that share them out, and `tp` each one."""
    holders = parameter.holders(tp)
    return Tensor(parameter.name, *parameter.local(tp, ep), holders, parameter.experts // ep)


def held_tensor(shape: RankShape, parameter: Parameter) -> Tensor:
    """A parameter as one rank stores it, also where ranks have some of the experts each."""
    if parameter.experts and (shape.dispatched or shape.spreads_experts):
        return _some_experts(parameter, 1 if shape.dispatched else shape.tp, shape.strategy.ep)
    return local_tensor(parameter, shape.tp)


def local_tensors(shape: RankShape, kind: str) -> tuple[Tensor, ...]:
    """All parameters of a kind of layer as one rank stores them, ordered by how many hold them.

    So the elements that ranks sum, and those that one rank counts and stores, are ranges of the
    flat layer. Experts that ranks share out come first, because fewer ranks have the same ones than
    have the rest. Vectors that are no multiple of WIDE come last of their kind, so that matrices
    behind them do not begin askew: OLMo Hybrid's 30 decays made torch take products of its MLPs by
    Ampere's kernels with loads of 4 bytes on an H200 (2026-11-28-h200-delta-rule).
    """
    every = stored(shape.model, kind, shape.training.lora, shape.element)
    tensors = (held_tensor(shape, parameter) for parameter in every)
    first = shape.spreads_experts
    return tuple(
        sorted(
            tensors,
            key=lambda one: (one.holders, first and not one.experts, one.elements % WIDE != 0),
        )
    )


def grouped_kernels(shape: RankShape) -> bool:
    """Whether one kernel multiplies all experts' rows: torch's does in bf16.

    The native runtime has one for each expert where these are large, and their rows are known.
    """
    model = shape.model
    if shape.dispatched:  # Transformer Engine's do in every precision
        return True
    widths = model.expert_width, model.ffn // shape.tp
    if not (shape.grouped and shape.training.precision == "bf16"):
        return False
    rows = shape.tokens * model.experts_per_token / max(1, model.experts)
    varying = shape.spreads_experts or shape.training.fp8_gemms or not shape.fused
    return groups_in_one(model.experts, *widths) and (varying or not worth_apart(rows, *widths))


def gradient_sum(shape: RankShape, tensors: tuple[Tensor, ...]) -> Stream:
    """Adding a micro-batch's gradient to its sum.

    Fused into the GEMM it reads and writes the sum; otherwise it also reads the GEMM's result. The
    native kernels fuse it into products that take its precision, grouped products apart.
    """
    gradient, launches = shape.training.gradient_bytes, len(tensors)
    elements = sum(tensor.elements for tensor in tensors)
    if shape.fused and not shape.sums_in_products:
        return Stream("gradient sum", (2 * gradient + shape.element) * elements, launches)
    apart = 1 + shape.element / (2 * gradient)
    # Transformer Engine's grouped products add to the sums themselves.
    unadded = grouped_kernels(shape) and not shape.dispatched
    grouped = (tensor.elements for tensor in tensors if tensor.experts and unadded)
    read = shape.element * sum(grouped)
    return Stream("gradient sum", 2 * gradient * elements + read, launches, eager=apart)


def new_gradients(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of parameters' gradients that live before they are added to their sums."""
    made = (t for t in tensors if not shape.sums_in_products or t.rows == 1)
    return shape.element * sum(t.elements for t in made)
