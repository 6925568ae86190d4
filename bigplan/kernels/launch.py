"""Generated kernels as functions of tensors: compiled once a source, launched with their tile."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bigplan.cost.kernel import KernelTime, Tile, grid
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.fuse import added_together, work_of
from bigplan.kernels.fusion.source import source

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bool": torch.bool,
    "int64": torch.int64,
}  # fmt: skip
Into = Mapping[str, Tensor]
NOTHING: Into = {}
COLUMNS, ROWS = 64, 32  # of the tile that adds up partial sums
ALIGNED = 16  # bytes: where Triton's compiler loads and stores vectors


@triton.jit
def _add_up(partial, first, second, programs, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of partial [1 or 2, programs, columns] over programs, always in the same order."""
    partial += tl.program_id(1).to(tl.int64) * programs * columns
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (column < columns)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        total += tl.load(partial + at, mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=column < columns)
    else:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=column < columns)


@cache
def compiled(text: str) -> Any:
    """The kernel of a source. Triton compiles it when it is launched the first time."""
    name = f"<bigplan kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    # Triton reads a kernel's text through `inspect`, which finds it here.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": "bigplan.kernels.generated"}
    exec(compile(text, name, "exec"), module)  # our own generator's text
    return module["kernel"]


def warmed(body: Body, tile: Tile) -> Any:
    """Triton's compiled kernel, in its cache for other processes too; nothing is launched.

    For tensors that are aligned to 16 bytes, as torch's own are.
    """
    sums = _summed(body)
    kinds = [DTYPES[v.dtype] for v in body.inputs]
    kinds += [torch.float32 if v.name in sums else DTYPES[v.dtype] for v in body.outputs]
    bytewise = [torch.int8 if kind == torch.bool else kind for kind in kinds]
    return compiled(source(body, tile)).warmup(*bytewise, grid=(1,), num_warps=tile.warps)


def _summed(body: Body) -> set[str]:
    """Outputs that are sums over rows."""
    return {s.value.name for s in body.stores if body.micros[s.micro].op == "sum_column"}


# Called before a kernel's first launch with its inputs, to set its tile.
PickTile = Callable[["LaunchedKernel", "Sequence[Tensor]"], None]


class LaunchedKernel:
    """A body with the tiles that the model likes best, as a function of its inputs."""

    def __init__(
        self,
        body: Body,
        choices: Sequence[tuple[Tile, KernelTime]],
        pick_tile: PickTile | None = None,
    ) -> None:
        self.body, self.choices, self.pick_tile = body, list(choices), pick_tile
        self.tile = self.choices[0][0]
        self.pairs = added_together(body)
        self._checked = False
        self._outputs = [(v.name, v.shape, v.strides, DTYPES[v.dtype]) for v in body.outputs]
        self._ready: dict[Tile, _Launch] = {}

    def __call__(self, *inputs: Tensor, into: Into = NOTHING) -> tuple[Tensor, ...]:
        """The kernel's outputs in order: new tensors, except for outputs whose names `into` has.

        The tensors of `into` may be inputs, because every position is read before it is written.
        """
        if inputs and inputs[0].is_cuda and inputs[0].device.index != torch.cuda.current_device():
            with torch.cuda.device(inputs[0].device):
                return self._checked_run(inputs, into)
        return self._checked_run(inputs, into)

    def _checked_run(self, inputs: Sequence[Tensor], into: Into) -> tuple[Tensor, ...]:
        if not self._checked and self.pick_tile is not None:
            self.pick_tile(self, inputs)
        if not self._checked:
            self._take_the_first_that_does_not_spill(inputs)
        return self.run_as(self.tile, inputs, into)

    @property
    def text(self) -> str:
        """The kernel's source with its tile."""
        return source(self.body, self.tile)

    def run_as(
        self, tile: Tile, inputs: Sequence[Tensor], into: Into = NOTHING
    ) -> tuple[Tensor, ...]:
        """The same with a tile of the caller's choice."""
        device = inputs[0].device
        outputs = [
            into[name]
            if name in into
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for name, shape, strides, dtype in self._outputs
        ]
        if not self.pairs:
            self._launch(tile, (*inputs, *outputs))
            return tuple(outputs)
        targets, partial = list(outputs), {}
        for pair in self.pairs:
            columns = self.body.outputs[pair[0]].elements
            shape = len(pair), tile.programs, columns
            partial[pair] = torch.empty(shape, dtype=torch.float32, device=device)
            for index, part in zip(pair, partial[pair].unbind(), strict=True):
                targets[index] = part
        self._launch(tile, (*inputs, *targets))
        for pair, sums in partial.items():
            _, programs, columns = sums.shape
            _add_up[(triton.cdiv(columns, COLUMNS), len(pair))](
                sums, outputs[pair[0]], outputs[pair[-1]], programs, columns,
                ROWS=ROWS, COLUMNS=COLUMNS,
            )  # fmt: skip
        return tuple(outputs)

    def _launch(self, tile: Tile, tensors: Sequence[Tensor]) -> None:
        if tile not in self._ready:  # writing the source takes milliseconds
            self._ready[tile] = _Launch(self.body, tile)
        self._ready[tile](tensors)

    def _take_the_first_that_does_not_spill(self, inputs: Sequence[Tensor]) -> None:
        """Take the first tile that does not spill: the model may estimate too few registers."""
        self._checked = True
        if inputs[0].device.type != "cuda":
            return
        best, fewest = self.tile, inf
        for tile, _ in self.choices:
            spills = self._spills(tile)
            if spills < fewest:
                best, fewest = tile, spills
            if not spills:
                break
        self.tile = best

    def fits(self, tile: Tile) -> bool:
        """Whether a program with this tile can run on this GPU at all."""
        return self._spills(tile) < inf

    def _spills(self, tile: Tile) -> float:
        """Spilled registers of a compiled candidate, without running it; inf: it cannot run."""
        made = warmed(self.body, tile)
        try:
            made._init_handles()  # loads it, after which its registers are known
        except OutOfResources:
            return inf
        return float(made.n_spills or 0)

    def tune(self, inputs: Sequence[Tensor], best: int, seconds: Callable[..., float]) -> None:
        """Keep the fastest of the model's best few that fit, by `seconds(function)`."""
        timed = []
        for tile, _ in self.choices[:best]:
            if inputs[0].device.type == "cuda" and self._spills(tile):
                continue
            timed.append((seconds(lambda tile=tile: self.run_as(tile, inputs)), tile))
        if timed:
            self.take(min(timed, key=lambda pair: pair[0])[1])

    def take(self, tile: Tile) -> None:
        """Run with this tile from now on, which is known to fit."""
        self.tile, self._checked = tile, True


class _Launch:
    """A kernel with a tile, called by its tensors in order.

    Triton's JIT looks at all arguments before each launch, to find the kernel that was compiled for
    their types and alignment. The body fixes the types, so only alignment is checked here. Tensors
    that are not aligned to 16 bytes go through the JIT.
    """

    def __init__(self, body: Body, tile: Tile) -> None:
        self.body, self.tile = body, tile
        self.jit = compiled(source(body, tile))
        self.grid = grid(work_of(body), tile), 1, 1
        every = (*body.inputs, *body.outputs)
        self.booleans = tuple(i for i, value in enumerate(every) if value.dtype == "bool")
        self._compiled: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch it in the current stream of the current device, which is the tensors'."""
        if self.booleans:
            tensors = list(tensors)
            for i in self.booleans:
                tensors[i] = _bytes(tensors[i])
        if tensors[0].is_cuda and all(not tensor.data_ptr() % ALIGNED for tensor in tensors):
            if self._compiled is None:
                self._compiled = warmed(self.body, self.tile)[self.grid]
            self._compiled(*tensors)
        else:
            self.jit[self.grid](*tensors, num_warps=self.tile.warps)


def _bytes(tensor: Tensor) -> Tensor:
    """Booleans as the bytes they are: kernels load and store integers."""
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor
