"""An MLP beside a block's experts, which all tokens pass, on one rank (runtime/experts/shared.py).

Its products, activation and sum are operators like those of a dense block's MLP, with collectives
of their own.
"""

from __future__ import annotations

from bigplan.graph.experts import weighting
from bigplan.graph.operators import Collective, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.sums import into_matrix, out_of_matrix
from bigplan.spec.layers import SHARED_ACTIVATION
from bigplan.spec.step import LayerStep, StepOp


def shared_inner_bytes(shape: RankShape) -> int:
    """Bytes of its gate, up or inner values on a tensor-parallel rank; 0 where there is none."""
    inner = (s.gives[0] for s in shape.steps(StepOp.ACTIVATION) if s.name == SHARED_ACTIVATION)
    return sum(map(shape.activation_shape.nbytes, inner))


def into_shared(shape: RankShape, name: str) -> tuple[Collective, ...]:
    """As `into_matrix`, where there is such an MLP; `name` and `beside` are the experts'."""
    return into_matrix(shape, name.replace("mlp", "shared")) if shape.model.shared_ffn else ()


def out_of_shared(shape: RankShape, name: str, beside: str) -> tuple[Collective, ...]:
    """As `out_of_matrix`, likewise."""
    if not shape.model.shared_ffn:
        return ()
    name, beside = (one.replace("mlp", "shared") for one in (name, beside))
    return out_of_matrix(shape, name, beside=beside)


def into_router(shape: RankShape, name: str) -> tuple[Collective, ...]:
    """Likewise, where a router reads something else than the experts do."""
    apart = shape.model.routes_apart
    return into_matrix(shape, name.replace("mlp", "router")) if apart else ()


def into_mlp(shape: RankShape, name: str) -> tuple[Collective, ...]:
    """As `into_matrix`, and of a shared MLP; ranks with whole experts have no matrix in parts."""
    beside = into_shared(shape, name)
    whole = shape.dispatched or not shape.model.has_mlp
    read = shape.read_by_experts
    return beside if whole else (*beside, *into_matrix(shape, name, whole=read))


def out_of_mlp(shape: RankShape, name: str, beside: str = "") -> tuple[Collective, ...]:
    """As `out_of_matrix`, likewise."""
    shared = out_of_shared(shape, name, beside)
    if shape.model.routes_apart and name.endswith("input"):
        shared += out_of_matrix(shape, name.replace("mlp", "router"), beside="router by weight")
    return (*shared, *out_of_experts(shape, name, beside))


def out_of_experts(shape: RankShape, name: str, beside: str = "") -> tuple[Collective, ...]:
    """As `out_of_mlp`, of experts or the only MLP alone."""
    if shape.dispatched or not shape.model.has_mlp:
        return ()
    return out_of_matrix(shape, name, beside=beside, whole=shape.read_by_experts)


def added(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """The stream with it or, of two mixers, with attention.

    In the backward, autograd adds up gradients by what the other part reads, too.
    """
    return Stream(step.name, 3 * shape.hidden), Stream(step.name, 3 * shape.hidden)


def gated_by_score(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream] | None:
    """Its activation times a weight for each token; None: it has no such gate."""
    return weighting(shape, step) if shape.model.shared_gate else None


def shared_workspace(shape: RankShape) -> int:
    """Bytes that its backward needs beyond what is saved, as a dense MLP's does.

    The gradient by what it reads, of the experts' backward before, lives beside.
    """
    inner = shared_inner_bytes(shape)
    if not inner:
        return 0
    plain = shape.fused and not shape.generated and shape.model.gated
    passes = (2 if shape.generated else 4) if shape.model.shared_gate else 2 + plain
    matrix = shape.model.hidden * (shape.model.shared_ffn // shape.tp) * shape.element
    by_product = 0 if shape.model.adds_product_of("shared") else shape.hidden
    return passes * inner + matrix + shape.gathered + shape.hidden + by_product
