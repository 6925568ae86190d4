"""What the runtime chooses outside of a plan is what the plan's bytes were counted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bigplan.cost.price import price
from bigplan.graph.build import build_graph
from bigplan.graph.shape import RankShape, local_tensors, new_gradients
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.cpu.native import Piece, Step
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.optimizer.fused import Kernel, fused_step
from tests.runtime.harness import started
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

ALONE = Strategy(dp=1)
PRECISIONS = [(p, g) for p in ("fp32", "bf16", "fp16") for g in dict.fromkeys(("fp32", p))]


@pytest.mark.parametrize(("precision", "gradients"), PRECISIONS)
def test_autograd_makes_the_gradients_that_the_workspace_has_room_for(
    precision: str, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph counts what a GPU's products leave to autograd; compute leaves as much to it."""
    made = dict[frozenset[str], int]()
    add = Sums.add

    def counted(self: Sums, found: Mapping[str, Tensor]) -> None:
        made[frozenset(self.totals)] = sum(tensor.nbytes for tensor in found.values())
        add(self, found)

    monkeypatch.setattr(Sums, "add", counted)
    training = tiny_training(1, precision=precision, gradient_precision=gradients)
    layers = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    model = tiny_model(qkv_bias=True)
    with started(plan_of(model, training, ALONE, layers)) as worker:
        worker.step()
    shape = RankShape(model, training, ALONE, fused=True)
    kinds = (local_tensors(shape, kind) for kind in ("block", "head"))
    assert made == {
        frozenset(tensor.name for tensor in tensors): new_gradients(shape, tensors)
        for tensors in kinds
    }


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["tiny-llama-demo", "llama-3-8b"])
def test_a_gpu_keeps_room_for_gradients_that_its_update_widens(model: str, gradients: str) -> None:
    """The GPU is so small that a share of its memory would not do for a large model's layers."""
    training = Training.model_validate(
        {"sequence_length": 8, "global_batch": 1, "gradient_precision": gradients}
    )
    graph = build_graph(find_model(model), training, ALONE, loss_chunk=1, fused=True)
    group = find_cluster("h200-1x").group
    gpu = group.gpu.model_copy(update={"memory": 2**30, "context_memory": 0})
    reserve = price(graph, training, group.model_copy(update={"gpu": gpu})).reserve
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[gradients]
    widened: list[int] = []

    def update(pieces: Sequence[Piece], _: Tensor | None) -> None:
        if gradients != "fp32":
            widened.append(sum(piece.gradient.nbytes for piece in pieces))

    for kind in graph.kinds.values():
        weights = torch.empty(kind.parameters, device="meta")
        fused_step([Piece(weights, weights.to(dtype))], Kernel(Step("", ()), update))
    assert max(widened, default=0) <= reserve
    assert (gradients != "fp32") == bool(widened)
