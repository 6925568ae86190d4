"""Seconds of a group of nodes as a generated kernel, and of torch's own operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, prod

from bigplan.cost.compute import Device, attention_seconds, gemm_seconds
from bigplan.cost.kernel import (
    LOADED,
    WARP,
    KernelTime,
    Shape,
    Tile,
    best_tiles,
    kernel_seconds,
    resident,
)
from bigplan.graph.operators import Attention, Gemm, doubled_reach
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.expansion import mask_of
from bigplan.kernels.fusion.fuse import (
    LARGEST_TILE,
    added_together,
    body_of,
    power_of_two,
    tiles_of,
    work_of,
)
from bigplan.kernels.fusion.graph import Arg, KernelGraph, KernelNode
from bigplan.kernels.fusion.strides import Unfusable
from bigplan.spec.gpu import Gpu
from bigplan.spec.multiprocessor import Multiprocessor

# Time of torch's operator over the time of moving its tensors once. Norms have medians of torch
# 2.11 on an H200 over six widths from 768 to 8,192 (benchmarks/results/2026-11-24-h200-generated,
# but for the shapes set aside). Softmax has the median of seven widths from 512 to 32,768 on an
# H100 (2026-11-25-h100-kernels-again; 1.2 to 2.9). Its backward multiplies gradient and output in a
# kernel before (aten/src/ATen/native/cuda/SoftMax.cu), and took 1.96 to 2.26. Cross-entropy's
# operators consist of several of torch's (`rewritten.py`): their factors count what those move, for
# fp32 logits.
TORCH_PASSES = {
    "native_layer_norm": 1.78,
    "_fused_rms_norm": 1.3,
    "_softmax": 1.44,
    "_softmax_backward_data": 2,
    "cross_entropy_rows": 6,
    "cross_entropy_rows_backward": 3,
}
TORCH_WARPS, TORCH_ELEMENTS = 4, 4  # of a program and a thread of torch's kernels
# Torch's norm backward is two kernels (aten/src/ATen/native/cuda/layer_norm_kernel.cu). One has a
# program a row, which reads the row twice. The other adds up columns, 256 rows at a time.
NORMS_BACK = frozenset(("native_layer_norm_backward", "_fused_rms_norm_backward"))
TORCH_ROW = Tile(Shape.LOOPED, 1, TORCH_ELEMENTS * WARP * TORCH_WARPS, TORCH_WARPS)
TORCH_COLUMNS = Tile(Shape.STRIP, 256, 32, 32)
KEPT_CHOICES = 8  # of a kernel's tiles, best first: for --tune, and in case some spill
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


@dataclass(frozen=True)
class Fused:
    """A group as one kernel: its body and the model's best tiles."""

    body: Body
    choices: tuple[tuple[Tile, KernelTime], ...]

    @property
    def tile(self) -> Tile:
        """The model's pick."""
        return self.choices[0][0]

    @property
    def time(self) -> KernelTime:
        """The pick's prediction."""
        return self.choices[0][1]

    @property
    def seconds(self) -> float:
        """The kernel's, with that of the one that adds up partial sums."""
        return self.time.seconds + len(added_together(self.body)) * self.time.start


class Pricer:
    """Prices groups on a GPU; the same nodes for the same results are priced once."""

    def __init__(self, gpu: Gpu, sm: Multiprocessor) -> None:
        self.gpu, self.sm = gpu, sm
        self.device = Device(gpu, "bf16" if "bf16" in gpu.peak_flops else "fp16")
        self._known: dict[tuple[frozenset[int], frozenset[str]], Fused | str] = {}
        self._nodes: list[KernelNode] = []  # kept, as keys are their identities

    def fused(
        self, graph: KernelGraph, nodes: Iterable[KernelNode], wanted: frozenset[str]
    ) -> Fused | str:
        """These nodes, in graph order, as one kernel; or why they cannot be one."""
        members = list(nodes)
        key = frozenset(map(id, members)), wanted
        if key not in self._known:
            self._nodes += members
            self._known[key] = self._fused(graph, members, wanted)
        return self._known[key]

    def _fused(
        self, graph: KernelGraph, nodes: list[KernelNode], wanted: frozenset[str]
    ) -> Fused | str:
        try:
            body = body_of(graph, nodes, wanted)
        except Unfusable as reason:
            return str(reason)
        tiles = tiles_of(body, self.gpu.multiprocessors)
        best = best_tiles(work_of(body), tiles, self.gpu, self.sm)
        if not best:
            return "its values do not fit in registers"
        return Fused(body, tuple(best[:KEPT_CHOICES]))

    def torch(self, graph: KernelGraph, node: KernelNode) -> float:
        """Seconds of torch's own operator: its bytes, products or attention, and a start.

        Other operators that compute much, such as convolutions, count only their bytes. They stay
        torch's in every cover, so their price changes no decision.
        """
        read = sum(graph.values[ref].nbytes for ref in dict.fromkeys(node.refs()))
        moved = (read + sum(value.nbytes for value in node.outputs)) * TORCH_PASSES.get(node.op, 1)
        if node.op in PRODUCTS:
            return gemm_seconds(product(graph, node), self.device) + self.sm.kernel_start
        if "scaled_dot_product" in node.op:
            return attention_seconds(attention(graph, node), self.device) + self.sm.kernel_start
        if node.op == "linear_cross_entropy":
            return self._in_chunks(graph, node)
        memory = max(moved / self.device.stream_rate, LOADED * self.sm.memory_latency)
        tiled = (self._norm_back if node.op in NORMS_BACK else self._as_torch_tiles)(graph, node)
        return max(memory + self.sm.kernel_start, tiled)

    def _in_chunks(self, graph: KernelGraph, node: KernelNode) -> float:
        """Seconds of a loss in chunks (`loss.py`): a product for logits, two for their gradients.

        In between a kernel reads the logits twice, and writes their gradient.
        """
        x, weight, _ = (graph.values[ref] for ref in node.refs())
        (tokens, width), words, chunk = x.shape, weight.shape[0], node.arguments["chunk"]
        assert isinstance(chunk, int)
        products = [Gemm(node.name, chunk, words, width)]
        if node.arguments["wanted"]:
            products += [
                Gemm(node.name, chunk, width, words),
                Gemm(node.name, words, width, chunk),
            ]
        kernel = 3 * chunk * words * x.nbytes / x.elements / self.device.stream_rate
        each = kernel + self.sm.kernel_start
        each += sum(gemm_seconds(one, self.device) + self.sm.kernel_start for one in products)
        return ceil(tokens / chunk) * each

    def _norm_back(self, graph: KernelGraph, node: KernelNode) -> float:
        """Seconds of torch's two kernels of a norm's backward; 0 where we have no such kernel."""
        wanted = mask_of(node)
        of_row = [v.name for v in node.outputs[:1] if wanted[0]]
        of_columns = [v.name for v in node.outputs[wanted[0] :]]
        seconds = 0.0
        for names, of_torch in ((of_row, TORCH_ROW), (of_columns, TORCH_COLUMNS)):
            if not names:
                continue
            try:
                work = work_of(body_of(graph, [node], names))
            except Unfusable:
                return 0.0
            # Programs walk down all rows: as many for 32 columns as run at once.
            at_once = resident(work, of_torch, self.sm) * self.gpu.multiprocessors
            down = max(1, at_once // ceil(work.width / of_torch.columns))
            tile = replace(of_torch, programs=down) if of_torch.strip else of_torch
            time = kernel_seconds(work, tile, self.gpu, self.sm)
            seconds += time.seconds if time else 0.0
        return seconds

    def _as_torch_tiles(self, graph: KernelGraph, node: KernelNode) -> float:
        """Seconds of a generated kernel of this node with the tile that torch's own has.

        Torch's norm or softmax has a block of four warps for each row. For two million rows of 64
        columns that takes ten times as long as their bytes (H200, torch 2.11). Other operators have
        four elements a thread. 0 if there is no such kernel, or if it adds up columns.
        """
        alone = self.fused(graph, [node], frozenset(v.name for v in node.outputs))
        if isinstance(alone, str):
            return 0.0
        work = work_of(alone.body)
        tile = Tile(Shape.FLAT, 1, TORCH_ELEMENTS * WARP * TORCH_WARPS, TORCH_WARPS)
        if work.levels:
            tile = Tile(Shape.ROW, 1, min(LARGEST_TILE, power_of_two(work.width)), TORCH_WARPS)
        if work.column_sums:
            return 0.0
        time = kernel_seconds(work, tile, self.gpu, self.sm)
        return time.seconds if time else 0.0


def product(graph: KernelGraph, node: KernelNode) -> Gemm:
    """The matrix product of a node."""
    names = ("mat1", "mat2") if node.op == "addmm" else ("self", "mat2")
    names = ("batch1", "batch2") if node.op == "baddbmm" else names
    first, second = (node.arguments[name] for name in names)
    assert isinstance(first, Arg)
    assert isinstance(second, Arg)
    *batch, m, k = graph.values[first.name].shape
    n = graph.values[second.name].shape[-1]
    return Gemm(node.name, m, n, k, prod(batch))


def attention(graph: KernelGraph, node: KernelNode) -> Attention:
    """Fused attention of queries [..., heads, s, d] and keys, of blocks within their window."""
    names = [node.arguments.get(name) for name in ("query", "key")]
    query, key = (graph.values[ref.name].shape for ref in names if isinstance(ref, Arg))
    length, columns = key[-2], query[-1]
    window = node.arguments.get("window")
    assert window is None or isinstance(window, int)
    causal = bool(node.arguments.get("is_causal"))
    flops = 2.0 * prod(query) * (doubled_reach(length, window) if causal else 2.0 * length)
    back = "backward" in node.op
    moved = sum(value.nbytes for value in node.outputs) + sum(
        graph.values[ref].nbytes for ref in dict.fromkeys(node.refs())
    )
    flops *= 2.5 if back else 1.0
    return Attention(node.name, flops, moved, back, columns, length, window=window)
