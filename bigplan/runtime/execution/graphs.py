"""Passes of blocks as CUDA graphs: the GPU repeats what it did in an earlier step.

Where kernels take less time than the Python that launches them, the plan has passes captured: one
launch repeats all kernels of a pass. gpt2-xl with one sequence of 256 tokens a micro-batch took
1.22 s a step without graphs and 0.21 s with them on an H200.

A graph reads and writes the same addresses every time. Parameters and sums of gradients have fixed
places anyway. All other tensors of the passes come from a pool that only the graphs use. Passes are
captured in the order of a step, as torch's allocator then gives the pool's memory out as it would
in any step. Later steps must therefore repeat all passes of that step in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigplan.content import Holds
from bigplan.program import Action, Op
from bigplan.runtime.context import Context, find
from bigplan.runtime.execution.compute import Compute
from bigplan.runtime.memory.buffers import Key
from bigplan.spec.layers import BLOCKS

BETWEEN = {Op.FORWARD: Holds.HIDDEN, Op.BACKWARD: Holds.HIDDEN_GRADIENT}  # what layers hand on


class _Lent:
    """A tensor's memory as torch.as_tensor takes it, without a share in keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def lent(tensor: Tensor) -> Tensor:
    """The same memory of a CUDA device; the allocator may give it to others at any time."""
    flat = torch.as_tensor(_Lent(tensor), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Kernels that this thread launches on its stream are only noted down, for `graph` to repeat.

    Tensors come from `pool`, of torch.cuda.graph_pool_handle. Other lanes go on meanwhile: what
    they ask of CUDA is not held against this thread.
    """
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured pass, and the tensors that it reads from one layer and leaves for the next."""

    graph: torch.cuda.CUDAGraph
    source: tuple[Key, Tensor]
    result: tuple[Key, Tensor]


class Graphs:
    """Runs the passes of one rank, those of blocks from graphs where the plan has them captured.

    A step's kernels are compiled and loaded in the first step, captured in the second.
    """

    def __init__(self, context: Context, compute: Compute) -> None:
        self._context = context
        self._plain = {Op.FORWARD: compute.forward, Op.BACKWARD: compute.backward}
        self._played: tuple[Action, ...] = ()  # passes of blocks in the step before
        self._captured: tuple[Action, ...] = ()  # the passes that have graphs
        self._passes: dict[Action, _Pass] = {}
        self._pool: Any = None
        self._left: dict[Key, int] = {}  # addresses of what captured passes left last
        self._repeats = False  # the step under way has graphs, or makes them

    def begin(self, actions: Iterable[Action]) -> None:
        """A step of these actions begins; nothing runs on the device."""
        self._repeats = False
        if not self._context.program.captured:
            return
        wanted = tuple(filter(self._is_block, actions))
        if not any(action.op is Op.BACKWARD for action in wanted):
            return  # an evaluation, or updates alone
        if self._captured and wanted != self._captured:
            self.close()
        if not self._captured and wanted == self._played:
            self._captured, self._pool = wanted, torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # the pool takes what activations took in the steps before
        self._repeats, self._played = bool(self._captured), wanted

    def _is_block(self, action: Action) -> bool:
        return action.op in self._plain and self._context.graph.layers[action.layer] in BLOCKS

    def run(self, action: Action) -> None:
        """Run a layer's pass on a micro-batch."""
        if not (self._repeats and self._is_block(action)):
            self._plain[action.op](action)
            return
        if action in self._passes:
            self._repeat(self._passes[action])
        else:
            self._passes[action] = self._capture(action)

    def _repeat(self, found: _Pass) -> None:
        dynamic, (key, place) = self._context.memory.dynamic, found.source
        given = dynamic[key]
        assert isinstance(given, Tensor)
        if given.data_ptr() != place.data_ptr():  # of a layer that is not captured
            place.copy_(given)
        found.graph.replay()
        dynamic[found.result[0]] = found.result[1]

    def _capture(self, action: Action) -> _Pass:
        """Capture the pass, and run it."""
        dynamic, kind = self._context.memory.dynamic, BETWEEN[action.op]
        source, result = (
            self._context.entries.key(find(refs, kind), action)
            for refs in (action.reads, action.writes)
        )
        given, graph = dynamic[source], torch.cuda.CUDAGraph()
        assert isinstance(given, Tensor)
        with capturing(graph, self._pool):
            # What a captured pass left lies in the pool; what another layer left is copied there.
            captured = given.data_ptr() == self._left.get(source)
            inside = given if captured else torch.empty_like(given)
            dynamic[source], place = inside, lent(inside)
            self._plain[action.op](action)
        left = dynamic[result]
        assert isinstance(left, Tensor)
        self._left[result] = left.data_ptr()
        found = _Pass(graph, (source, place), (result, lent(left)))
        if not captured:
            place.copy_(given)
        graph.replay()
        return found

    def close(self) -> None:
        """Forget what was captured, and give its memory back."""
        if not self._captured:
            return
        torch.cuda.synchronize(self._context.device)
        self._passes.clear()
        self._left.clear()
        self._captured, self._played, self._pool = (), (), None
        torch.cuda.empty_cache()
