"""Some nodes of a graph as one kernel: its domain, its body, and the work that the model prices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod

from bigplan.cost.kernel import KernelWork, Shape, Tile
from bigplan.kernels.fusion.body import ROW_REDUCTIONS, Body, Domain, Micro, OutputPiece, Varies
from bigplan.kernels.fusion.builder import Builder
from bigplan.kernels.fusion.graph import SIZES, Arg, KernelGraph, KernelNode, KernelValue
from bigplan.kernels.fusion.operators import EXPAND, why_not
from bigplan.kernels.fusion.strides import PARTS, Unfusable, bounds, part, unit

MOST_PIECES = 8  # each is code of its own
REDUCTIONS = frozenset(("sum", "mean", "amax"))
ROWS_REDUCED = frozenset(
    (
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "cross_entropy_and_gradient",
        "cross_entropy_rows",
    )
)
# fp32 operations on lanes and special functions (exponential, root, reciprocal) of each operation:
# a tanh is an exponential, a division and its polynomial near 0; erf is a polynomial of CUDA's.
LANE_OPERATIONS = {
    "exp": 1, "log": 2, "sqrt": 2, "rsqrt": 1, "reciprocal": 2, "sigmoid": 4, "tanh": 14,
    "erf": 24, "div": 6, "load": 1, "load_bool": 1, "number": 0, "column": 0,
}  # fmt: skip
SPECIAL = {"exp", "log", "sqrt", "rsqrt", "reciprocal", "div"}
TWICE_SPECIAL = {"sigmoid", "tanh", "erf"}
# Elements of a candidate's tile, and programs of a strip on a multiprocessor.
LEAST_TILE, LARGEST_TILE = 256, 32768
STAGES = (1, 3)  # of a strip: loads when they are needed, or two turns ahead
STAGES_TWICE = (1, 2)  # one turn ahead, as a row of each pass takes shared memory
STRIPS = (1, 2, 3, 4, 6, 8)
LINE = 128  # bytes of the caches: what a tile has at least of a tensor whose rows lie side by side
# Of a thread. More warps with fewer elements each leave the compiler free to issue all loads before
# their first use.
MOST_ELEMENTS = 32


def body_of(graph: KernelGraph, members: Collection[KernelNode], wanted: Collection[str]) -> Body:
    """The kernel that computes `members`, in graph order, and writes `wanted`. Raises Unfusable."""
    nodes = list(members)
    for node in nodes:
        reason = why_not(node)
        if reason:
            raise Unfusable(reason)
    reasons = []
    for domain in _domains(graph, nodes):
        try:
            return _built(graph, nodes, wanted, domain)
        except Unfusable as reason:
            reasons.append(str(reason))
    raise Unfusable(reasons[-1] if reasons else "it has neither rows nor columns")


def _built(
    graph: KernelGraph, nodes: list[KernelNode], wanted: Collection[str], domain: Domain
) -> Body:
    builder = Builder(graph, nodes, domain)
    for node in nodes:
        vals = EXPAND[node.op](builder, node)
        for value, val in zip(node.outputs, vals, strict=True):
            positions = domain.rows * domain.width * len(val.pieces)
            if val.varies is Varies.FULL and value.elements != positions:
                raise Unfusable("its inputs vary with rows and with columns, its result with one")
            builder.values[value.name] = val._replace(shape=builder.seen(value).shape)
    outputs = tuple(v for node in nodes for v in node.outputs if v.name in wanted)
    stores = tuple(store for value in outputs for store in builder.stored(value))
    micros, stores = _used(builder, stores)
    read = {micro.source for micro in micros if micro.source}
    inputs = tuple(value for name, value in builder.inputs.items() if name in read)
    body = Body(domain.rows, domain.width, micros, inputs, stores, outputs)
    if not inputs:
        raise Unfusable("it reads nothing")
    if not any(micro.varies is Varies.FULL for micro in micros):
        raise Unfusable("it has no tensor of its rows and columns")
    if max(len(val.pieces) for val in builder.values.values()) > MOST_PIECES:
        raise Unfusable(f"its columns fall into more than {MOST_PIECES} pieces")
    return body


def _used(
    builder: Builder, stores: tuple[OutputPiece, ...]
) -> tuple[tuple[Micro, ...], tuple[OutputPiece, ...]]:
    """Operations that lead to a store, renumbered in their order."""
    needed, stack = set(), [store.micro for store in stores]
    while stack:
        index = stack.pop()
        if index not in needed:
            needed.add(index)
            stack += builder.micros[index].arguments
    order = {old: new for new, old in enumerate(sorted(needed))}
    micros = tuple(
        replace(m, arguments=tuple(order[a] for a in m.arguments))
        for m in (builder.micros[old] for old in sorted(needed))
    )
    return micros, tuple(store._replace(micro=order[store.micro]) for store in stores)


def _domains(graph: KernelGraph, nodes: list[KernelNode]) -> Iterator[Domain]:
    """Rows and columns that might do, best first."""
    shapes = [value.shape for node in nodes for value in node.outputs]
    last = any(_channels_last(value) for node in nodes for value in node.outputs)
    reduced = [shape for node in nodes if (shape := _reduced(graph, node))]
    if not reduced:
        widest = max(shapes, key=prod, default=())
        if prod(widest) > 1 and not any(n.op in ("cat", "slice_backward") for n in nodes):
            yield Domain(1, prod(widest), flat=True)
        if last and len(widest) == 4:
            yield Domain(prod(widest) // widest[1], widest[1], channels_last=True)
        if len(widest) > 3 and prod(widest[2:]) > 1:  # images of channels
            yield Domain(prod(widest[:2]), prod(widest[2:]))
    read = [graph.values[ref].shape for node in nodes for ref in node.refs()]
    widest = max(reduced or [*shapes, *read], key=prod, default=())
    if not widest or prod(widest) <= 1 or 0 in widest:
        return
    columns = widest[-1]
    rows = prod(widest) // columns
    sizes = [columns, *_cuts(graph, nodes)]
    sizes += [s[-1] for s in (*shapes, *read) if s and s[-1] > 1 and prod(s) == rows * s[-1]]
    if columns > 1 and (rows > 1 or reduced):
        yield Domain(rows, unit(sizes), channels_last=last)


def _channels_last(value: KernelValue) -> bool:
    """Whether it is images [n, c, h, w], of more than a pixel, with channels side by side."""
    shape = value.shape
    return len(shape) == 4 and shape[1] > 1 == value.strides[1] and shape[2] * shape[3] > 1


def _reduced(graph: KernelGraph, node: KernelNode) -> tuple[int, ...]:
    """The shape that a reduction of a node runs over, or none."""
    if node.op in REDUCTIONS or node.op in ROWS_REDUCED:
        names = ("self", "input", "grad_output")
        ref = next(node.arguments[n] for n in names if n in node.arguments)
        assert isinstance(ref, Arg)
        return graph.values[ref.name].shape
    return ()


def _cuts(graph: KernelGraph, nodes: list[KernelNode]) -> Iterator[int]:
    """Columns at which a tensor is cut or joined."""
    inside = {value.name for node in nodes for value in node.outputs}
    for node in nodes:
        for ref in node.refs():
            name = ref
            while graph.base[name] in inside and name in graph.producer:
                view = graph.producer[name]
                if not view.layout:
                    break
                taken, name = name, next(view.refs())
                if view.op in PARTS:
                    shape = graph.values[name].shape
                    dim, *cuts = part(view, taken, shape)
                    yield from (cut for cut in cuts if cut and dim == len(shape) - 1)
        if node.op == "slice_backward":
            yield from (cut for cut in bounds(node, node.outputs[0].shape[-1]) if cut)
        if node.op == "cat":
            yield from (graph.values[ref].shape[-1] for ref in node.refs())


def work_of(body: Body) -> KernelWork:
    """A kernel's work, which the model prices."""
    full = [m for m in body.micros if m.varies is Varies.FULL]
    reductions = [m for m in body.micros if m.op in (*ROW_REDUCTIONS, "sum_column")]
    columns = [m for m in body.micros if m.varies is Varies.COLUMN and m.op.startswith("load")]
    lane = sum(LANE_OPERATIONS.get(m.op, 1) for m in full)
    lane += len(reductions) + len(columns)
    lane += sum(1 for store in body.stores if store.varies is Varies.FULL)
    special = sum((m.op in SPECIAL) + 2 * (m.op in TWICE_SPECIAL) for m in full)
    # A running sum of exponentials takes two of them, the maximum, two differences and a product.
    lane, special = lane + 6 * len(body.of("lse_row")), special + 2 * len(body.of("lse_row"))
    by_program = sum(v.nbytes for v in body.inputs if any(m.source == v.name for m in columns))
    again = sum(
        v.nbytes
        for v in body.inputs
        if any(m.source == v.name and m.varies is Varies.FULL for m in body.micros)
    )
    sums = body.of("sum_column")
    sizes = {value.name: SIZES[value.dtype] for value in body.inputs}
    steady = len(sums) + sum(sizes[m.source] / 4 for m in columns)
    return KernelWork(
        body.rows,
        body.width,
        float(sum(value.nbytes for value in body.inputs)),
        float(sum(value.nbytes for value in body.outputs)),
        lane,
        special,
        _live(body) + len(sums),
        _packed(body),
        max(levels(body), default=0),
        len(body.row_reductions),
        4 * _packed(body),
        len(sums),
        float(by_program),
        float(again),
        steady,
    )


def added_together(body: Body) -> list[tuple[int, ...]]:
    """Places of outputs that are sums over rows, grouped by the kernel that adds up their strips.

    One kernel adds two outputs with equally many columns, such as gradients of weight and bias.
    """
    summed = {s.value.name for s in body.stores if body.micros[s.micro].op == "sum_column"}
    places = [i for i, value in enumerate(body.outputs) if value.name in summed]
    found: list[tuple[int, ...]] = []
    for i in places:
        last = found[-1] if found else ()
        if len(last) == 1 and body.outputs[last[0]].elements == body.outputs[i].elements:
            found[-1] = (*last, i)
        else:
            found.append((i,))
    return found


def levels(body: Body) -> list[int]:
    """For every operation, the longest chain of row reductions that ends in it, itself included."""
    found: list[int] = []
    for micro in body.micros:
        before = max((found[a] for a in micro.arguments), default=0)
        found.append(before + (micro.op in ROW_REDUCTIONS))
    return found


def _live(body: Body) -> float:
    """The most values of a position held at once; loaded values stay packed in their dtype."""
    last: dict[int, int] = {}
    for index, micro in enumerate(body.micros):
        last.update(dict.fromkeys(micro.arguments, index))
    last.update({store.micro: len(body.micros) for store in body.stores})
    sizes = {value.name: SIZES[value.dtype] for value in body.inputs}
    most = held = 0.0
    alive: dict[int, float] = {}
    for index, micro in enumerate(body.micros):
        if micro.varies in (Varies.FULL, Varies.COLUMN) and micro.op != "sum_column":
            alive[index] = max(0.5, sizes.get(micro.source, 4) / 4)
        held = sum(alive.values())
        most = max(most, held)
        for gone in [i for i in alive if last.get(i, i) <= index]:
            del alive[gone]
    return most


def _packed(body: Body) -> float:
    """32-bit registers of a position for what is loaded, in its own dtype."""
    sizes = {value.name: SIZES[value.dtype] for value in body.inputs}
    whole = (m for m in body.micros if m.varies is Varies.FULL and m.source)
    return sum(sizes[micro.source] / 4 for micro in whole)


def tiles_of(body: Body, multiprocessors: int) -> list[Tile]:
    """Candidates for the kernel's tile, warps and programs."""
    reduces, adds = bool(body.row_reductions), bool(body.of("sum_column"))
    ways = [(Shape.STRIP, stages) for stages in STAGES]
    if reduces:
        ways += [(Shape.TWICE, stages) for stages in STAGES_TWICE]
    whole = power_of_two(body.width)
    found = []
    for columns, rows in _tiles(body, whole, whole_rows=reduces):
        for warps in (1, 2, 4, 8, 16, 32):
            few = rows * columns < 64 * warps and warps > 1
            if few or rows * columns > MOST_ELEMENTS * 32 * warps:
                continue
            if adds:
                tiles = -(-body.rows // rows)
                for strips in STRIPS:
                    programs = min(tiles, strips * multiprocessors)
                    found += [
                        Tile(shape, rows, columns, warps, programs, stages)
                        for shape, stages in ways
                    ]
            elif reduces:
                shape = Shape.ROW if columns >= body.width else Shape.LOOPED
                found.append(Tile(shape, rows, columns, warps))
            else:
                found.append(Tile(Shape.FLAT, rows, columns, warps))
    return list(dict.fromkeys(found))


def _tiles(body: Body, whole: int, *, whole_rows: bool) -> Iterator[tuple[int, int]]:
    """Columns and rows of tiles; without `whole_rows`, columns may be cut."""
    adds = bool(body.of("sum_column"))
    widths = (
        {whole} if whole_rows else {min(whole, 2**k) for k in range(6, 14)}
    )  # rows of 128 bytes in bf16, at least
    if whole_rows and not adds and whole > 1024:
        widths |= {1024, 2048, 4096, 8192}
    tallest = power_of_two(body.rows)
    least = min(tallest, max((LINE // size for size in _sizes_down(body)), default=1))
    for columns in sorted(width for width in widths if width <= LARGEST_TILE):
        for rows in (2**k for k in range(9)):
            small = columns * rows < LEAST_TILE and rows < tallest and columns < whole
            if least <= rows <= tallest and columns * rows <= LARGEST_TILE and not small:
                yield columns, rows


def _sizes_down(body: Body) -> Iterator[int]:
    """Bytes of an element of each tensor whose neighbours in memory are of the next row.

    Images that are read in one order and written in the other are such.
    """
    values = {value.name: value for value in (*body.inputs, *body.outputs)}
    read = ((m.source, m.place) for m in body.micros if m.varies is Varies.FULL and m.place)
    for name, place in (*read, *((s.value.name, s.place) for s in body.stores)):
        if place.step > 1 and place.strides and place.strides[-1] == 1:
            yield SIZES[values[name].dtype]


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()
