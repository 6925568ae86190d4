"""LoRA: small trained matrices beside products of frozen ones (Hu et al., arXiv 2106.09685).

y = x W^T + s (x A^T) B^T, with A [rank, in] and B [out, rank], which begins as zeros. W and all
other parameters of the model are frozen: in the compute dtype, without gradient or state.

Experts' matrices have an A and a B for each expert, which take turns in the rows of one matrix, as
experts do. They take so much more memory than others that they have to be named in `targets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Literal, cast

from pydantic import Field, model_validator

from bigplan.errors import InputError, quoted
from bigplan.spec.expert_steps import ROUTER
from bigplan.spec.files.document import Spec
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.four_bits import BLOCK as TOGETHER
from bigplan.spec.four_bits import is_packed, packed_columns
from bigplan.spec.layers import BLOCK, BLOCKS, OF_AN_EXPERT, SHARED_GATE
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, Parameter, Split, StepOp

HIGHEST_RANK = 1024
# Experts' products of what a router sends, and the one that leads back.
OF_SENT, RETURNING = ("experts.gate_proj", "experts.up_proj"), "experts.down_proj"
_WEIGHT = ".weight"


def _twice_the_rank(data: dict[str, int]) -> float:
    return 2.0 * data["rank"]


class LoraRequest(Spec):
    """The `lora:` part as the user writes it: with `weights` all else is optional."""

    rank: int | None = Field(default=None, gt=0, le=HIGHEST_RANK)
    """columns between A and B; default: that of `weights`"""
    alpha: float | None = Field(default=None, gt=0)
    """adapters count alpha / rank; default: that of `weights`, or 2 x rank"""
    targets: tuple[str, ...] | None = None
    """products with an adapter, such as [q_proj, v_proj]; default: those of `weights`, or all but
    experts'"""
    rank_stabilised: bool | None = None
    """adapters count alpha / sqrt(rank) in place of alpha / rank; default: as `weights`, or no"""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """probability that an adapter in training reads an element as 0; default: as `weights`, or 0"""
    frozen: Literal["nf4"] | None = None
    """how the blocks' frozen matrices are stored: nf4 in 4 bits (QLoRA); null: in `precision`"""
    weights: str | None = Field(default=None, min_length=1)
    """peft's folder of adapters to start from; default: new ones, which change nothing at first"""

    @model_validator(mode="after")
    def _check(self) -> LoraRequest:
        if self.rank is None and self.weights is None:
            raise InputError(
                "lora has no rank; write one, such as 16, or `weights` with a folder of adapters"
            )
        return self


class Lora(Spec):
    """Low-rank adapters of the blocks' products; nothing else of the model is trained."""

    rank: int = Field(gt=0, le=HIGHEST_RANK)
    """columns between A and B"""
    alpha: float = Field(default_factory=_twice_the_rank, gt=0)
    """adapters count alpha / rank; default: 2 x rank"""
    targets: tuple[str, ...] | None = None
    """products with an adapter, such as [q_proj, v_proj]; default: all of the model's blocks but
    experts'"""
    rank_stabilised: bool = False
    """adapters count alpha / sqrt(rank) in place of alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1, exclude_if=lambda rate: not rate)
    """probability that an adapter in training reads an element as 0; others grow by 1 / (1 - it)"""
    frozen: Literal["nf4"] | None = None
    """how the blocks' frozen matrices are stored: nf4 in 4 bits (QLoRA); null: in `precision`"""
    weights: str | None = Field(default=None, min_length=1, exclude_if=lambda weights: not weights)
    """peft's folder of adapters to start from; null: new ones"""

    @property
    def scale(self) -> float:
        """What an adapter's result is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilised else self.rank)


def targets_of(model: ModelSpec, kinds: Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the products that have adapters unless targets are named: all but experts'.

    In blocks of these kinds, or of all: as in a forward, those of the block that comes first before
    others.
    """
    every = possible_targets(model, kinds)
    return tuple(target for target in every if not target.startswith(OF_AN_EXPERT))


def possible_targets(model: ModelSpec, kinds: Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the products that may have adapters, likewise."""
    of = (kind for kind in kinds or dict.fromkeys(model.layer_sequence()) if kind in BLOCKS)
    products = (step for kind in of for step in model.steps(kind) if step.op is StepOp.PRODUCT)
    return tuple(dict.fromkeys(_module(matrix) for step in products for matrix in _adaptable(step)))


def adapted_steps(model: ModelSpec, kind: str, lora: Lora | None) -> tuple[LayerStep, ...]:
    """What one layer of a kind does where adapters are trained; None: all of the model is.

    A frozen matrix has no gradient, so a product's input is kept only if an adapter reads it.
    """
    steps = model.steps(kind)
    return steps if lora is None else _adapted(steps, kind in BLOCKS, lora)


def adapters(model: ModelSpec, lora: Lora | None, kind: str = BLOCK) -> tuple[Parameter, ...]:
    """The trained matrices of one layer of a kind, in the order of a forward; none without `lora`.

    Layers that are no blocks have none.
    """
    return tuple(p for step in adapted_steps(model, kind, lora) for p in step.adapters)


def stored(model: ModelSpec, kind: str, lora: Lora | None, element: int) -> tuple[Parameter, ...]:
    """The model's parameters of one layer of a kind as they are stored, in elements of that size.

    In 4 bits a matrix of a block has rows as ever, and the packed columns of each.
    """
    parameters = model.kinds()[kind]
    if lora is None or lora.frozen is None or kind not in BLOCKS:
        return parameters
    return _packed(parameters, element)


@lru_cache(maxsize=64)  # asked at every pass of a layer
def _packed(parameters: tuple[Parameter, ...], element: int) -> tuple[Parameter, ...]:
    return tuple(
        replace(p, shape=(p.shape[0], packed_columns(p.shape[1], element))) if is_packed(p) else p
        for p in parameters
    )


def packs(model: ModelSpec, lora: Lora | None, tp: int) -> bool:
    """Whether each of `tp` ranks has whole blocks of 4-bit elements in every row."""
    if lora is None or lora.frozen is None:
        return True
    return all(matrix.local(tp)[1] % TOGETHER == 0 for matrix in _to_pack(model))


def _to_pack(model: ModelSpec) -> Iterator[Parameter]:
    """The matrices of all kinds of blocks that are stored in 4 bits."""
    every = (p for kind, of in model.kinds().items() if kind in BLOCKS for p in of)
    return (parameter for parameter in every if is_packed(parameter))


def trained(model: ModelSpec, kind: str, lora: Lora | None) -> tuple[Parameter, ...]:
    """The trained parameters of one layer of a kind: adapters, or all of it without `lora`."""
    if lora is None:
        return model.kinds()[kind]
    return adapters(model, lora, kind)


def trained_count(model: ModelSpec, lora: Lora | None) -> int:
    """Elements of the whole model that are trained."""
    if lora is None:
        return model.parameter_count
    each = {k: sum(p.count for p in adapters(model, lora, k)) for k in model.kinds()}
    return sum(each[kind] for kind in model.layer_sequence())


@lru_cache(maxsize=256)
def _adapted(steps: tuple[LayerStep, ...], block: bool, lora: Lora) -> tuple[LayerStep, ...]:
    return tuple(_frozen(step, lora, block) for step in steps)


def _frozen(step: LayerStep, lora: Lora, block: bool) -> LayerStep:
    if step.op is StepOp.PRODUCT:
        return _with_adapters(step, lora, block)
    if step.op is StepOp.ROUTE and not _sends_to_adapters(step, lora):
        return replace(step, saves=tuple(v for v in step.saves if v != step.reads[0]))
    return step


def _sends_to_adapters(route: LayerStep, lora: Lora) -> bool:
    """Whether gradients of experts' adapters read again what it sends."""
    assert route.op is StepOp.ROUTE
    return any(name in (lora.targets or ()) for name in OF_SENT)


def _with_adapters(step: LayerStep, lora: Lora, block: bool) -> LayerStep:
    """A product with its adapters: all A, then all B, so that one product with all A is enough."""
    wanted = [matrix for matrix in _adaptable(step) if block and _wanted(matrix, lora)]
    pairs = [_pair(matrix, lora.rank) for matrix in wanted]
    flat = (*(a for a, _ in pairs), *(b for _, b in pairs))
    return replace(step, adapters=flat, saves=step.saves if pairs else ())


def _wanted(matrix: Parameter, lora: Lora) -> bool:
    """Whether it has adapters: one that is named, or any that is not of experts."""
    if lora.targets is None:
        return not matrix.experts
    return _module(matrix) in lora.targets


def _adaptable(step: LayerStep) -> Iterator[Parameter]:
    """The matrices that may have adapters."""
    matrices = (p for p in step.parameters if p.name.endswith(_WEIGHT))
    return (matrix for matrix in matrices if matrix.name not in (ROUTER, SHARED_GATE))


def _module(matrix: Parameter) -> str:
    return matrix.name.removesuffix(_WEIGHT)


def _pair(matrix: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """A and B of a matrix.

    Where ranks split the matrix by rows, each has its rows of B and all of A; where they split it
    by columns, its columns of A and all of B. So adapters need no further sum over ranks. Where
    each rank has the whole matrix, it has all of both.
    """
    if matrix.experts:
        return _pair_of_experts(matrix, rank)
    (rows, columns), module, split = matrix.matrix, _module(matrix), matrix.split
    down: Split = "columns" if split == "columns" else "replicated"
    up: Split = "rows" if split == "rows" else "replicated"
    first = Parameter(f"{module}.lora_A", (rank, columns), down, True)
    return first, Parameter(f"{module}.lora_B", (rows, rank), up, True, heads=matrix.heads)


def _pair_of_experts(matrix: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """Those of all experts' matrices, [f x experts, h], of which ranks have parts of f.

    Row j x experts + e is row j of expert e's, or its column j: as of the matrix of the last
    product, so of its A [f x experts, rank] and B [rank x experts, h].
    """
    module, each = _module(matrix), matrix.experts
    narrow, wide = (rank * each, matrix.shape[1]), (matrix.shape[0], rank)
    returns = module == RETURNING

    def one(side: str, *, split: bool) -> Parameter:
        shape, by = (wide, "rows") if split else (narrow, "replicated")
        return Parameter(f"{module}.lora_{side}", shape, cast(Split, by), True, experts=each)

    return one("A", split=returns), one("B", split=not returns)


def inputs_of(adapter: Parameter) -> int:
    """Columns of one A: of an expert's, where experts take turns in its rows."""
    if adapter.experts and adapter.split == "rows":
        return adapter.shape[0] // adapter.experts
    return adapter.shape[1]


def passed_count(model: ModelSpec, lora: Lora | None) -> int:
    """Elements of the whole model's adapters that a token passes: those of its experts."""
    kinds = {
        kind: sum(
            p.count * model.experts_per_token // p.experts if p.experts else p.count
            for p in adapters(model, lora, kind)
        )
        for kind in model.kinds()
    }
    return sum(kinds[kind] for kind in model.layer_sequence())


def check_lora(lora: Lora, model: ModelSpec) -> None:
    """Raise InputError where the model has none of the targets, or rows that no scale fits."""
    if not packs(model, lora, 1):
        widths = sorted({matrix.shape[1] for matrix in _to_pack(model)})
        raise InputError(
            f"lora.frozen nf4 stores {TOGETHER} elements of a row with one scale, and rows "
            f"of {model.name} have {', '.join(map(str, widths))}, which do not all divide by it; "
            "leave `frozen` out"
        )
    known = possible_targets(model)
    if lora.targets is None:
        return
    if lora.dropout and (of_experts := [t for t in lora.targets if t.startswith(OF_AN_EXPERT)]):
        raise InputError(
            f"lora.dropout is {lora.dropout:g}, and adapters of experts ({', '.join(of_experts)}) "
            "have none, as in peft; use dropout 0, or leave them out of targets"
        )
    if not lora.targets:
        raise InputError(f"lora.targets is empty; name some of {', '.join(known)}, or leave it out")
    for target in lora.targets:
        if target not in known:
            hint = did_you_mean(target, known)
            routers = "; routers stay as they are" if model.experts else ""
            raise InputError(
                f"lora.targets has {quoted(target)}, but blocks of {model.name} have no such "
                f"product: they have {', '.join(known)}{routers}{hint}"
            )
    if len(set(lora.targets)) < len(lora.targets):
        raise InputError("lora.targets names a product twice; name each once")
