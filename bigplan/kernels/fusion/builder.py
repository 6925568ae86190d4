"""Makes the body of a kernel from nodes of a graph, one operator after the other.

Operators that do not fit a body's form raise Unfusable with the reason. They stay in separate
kernels, or torch's.
"""

from __future__ import annotations

from math import prod

from bigplan.kernels.fusion.body import Domain, Micro, OutputPiece, Place, Val, Varies, join
from bigplan.kernels.fusion.graph import FLOATS, Arg, Argument, KernelGraph, KernelNode, KernelValue
from bigplan.kernels.fusion.strides import (
    LAST,
    PARTS,
    Unfusable,
    channels_moved,
    collapsed,
    part,
    still,
    together,
)


class Builder:
    """Makes a body of some nodes of a graph, in their order; `operators.EXPAND` calls it."""

    def __init__(self, graph: KernelGraph, members: list[KernelNode], domain: Domain) -> None:
        self.graph, self.domain = graph, domain
        self.rows, self.width, self.flat = domain.rows, domain.width, domain.flat
        self.inside = {value.name for node in members for value in node.outputs}
        self.whole = {ref for node in members for ref in node.refs()}  # what members read as it is
        self.values: dict[str, Val] = {}
        self.micros: list[Micro] = []
        self.inputs: dict[str, KernelValue] = {}
        self._known: dict[Micro, int] = {}

    # --- Operations.

    def micro(self, op: str, *arguments: int, varies: Varies | None = None) -> int:
        """An operation on earlier ones; the same one twice is one."""
        kind = varies or join(*(self.micros[a].varies for a in arguments))
        return self._add(Micro(op, arguments, kind))

    def _add(self, micro: Micro) -> int:
        if micro not in self._known:
            self._known[micro] = len(self.micros)
            self.micros.append(micro)
        return self._known[micro]

    def number(self, value: float) -> Val:
        """A constant."""
        return Val((), Varies.ONE, (self._add(Micro("number", (), Varies.ONE, float(value))),))

    def apply(self, op: str, *operands: Val | float) -> Val:
        """An operation on whole tensors that broadcast, piece by piece."""
        vals = [x if isinstance(x, Val) else self.number(x) for x in operands]
        many = max(len(val.pieces) for val in vals)
        if any(len(val.pieces) not in (1, many) for val in vals):
            raise Unfusable("its inputs have different columns")
        pieces = tuple(
            self.micro(op, *(v.pieces[i if len(v.pieces) > 1 else 0] for v in vals))
            for i in range(many)
        )
        shape = max((val.shape for val in vals), key=lambda s: (len(s), prod(s)))
        return Val(shape, join(*(val.varies for val in vals)), pieces)

    def over_row(self, op: str, x: Val) -> Val:
        """Sum or maximum over the columns."""
        if x.varies is not Varies.FULL:
            raise Unfusable("it reduces what does not vary with both rows and columns")
        if op == "lse_row" and len(x.pieces) > 1:
            raise Unfusable("its exponentials are in several pieces")
        whole = x.pieces[0]
        for piece in x.pieces[1:]:
            whole = self.micro("add" if op == "sum_row" else "maximum", whole, piece)
        result = self.micro(op, whole, varies=Varies.ROW)
        return Val((*x.shape[:-1], 1), Varies.ROW, (result,))

    def integers(self, node: KernelNode, name: str, rows: tuple[int, ...]) -> Val:
        """An int64 argument with a value a row, which stays whole numbers."""
        ref = node.arguments[name]
        assert isinstance(ref, Arg)
        value = self.graph.values[ref.name]
        if value.dtype != "int64" or self.graph.base[ref.name] in self.inside:
            raise Unfusable("its whole numbers are none that it reads as int64")
        self.inputs[value.name] = value
        return self._broadcast(value, rows)

    def gathered(self, x: Val, column: Val) -> Val:
        """A loaded tensor's value in one column (an integer) of each row; 0 beyond the columns."""
        loaded = self.micros[x.pieces[0]]
        if loaded.op == "widen":  # a loaded value is fp32 as it is
            loaded = self.micros[loaded.arguments[0]]
        if loaded.op != "load" or len(x.pieces) > 1 or loaded.varies is not Varies.FULL:
            raise Unfusable("it looks columns up in what is computed")
        micro = Micro("gather", column.pieces, Varies.ROW, source=loaded.source, place=loaded.place)
        return Val((*x.shape[:-1], 1), Varies.ROW, (self._add(micro),))

    def columns(self) -> Val:
        """The number of the column, from 0."""
        index = self._add(Micro("column", (), Varies.COLUMN))
        return Val((self.width,), Varies.COLUMN, (index,))

    def over_column(self, x: Val) -> Val:
        """Sum over the rows; the result can only be written."""
        if x.varies is not Varies.FULL:
            raise Unfusable("it adds up rows of what does not vary with both rows and columns")
        pieces = tuple(self.micro("sum_column", p, varies=Varies.COLUMN) for p in x.pieces)
        return Val((x.shape[-1],), Varies.COLUMN, pieces)

    # --- Tensors.

    def argument(self, node: KernelNode, name: str, like: tuple[int, ...] | None = None) -> Val:
        """An argument of a node, as it broadcasts to the node's first output or `like`."""
        if like is None:
            like = self.seen(node.outputs[0]).shape
        return self.operand(node.arguments.get(name), like)

    def seen(self, value: KernelValue) -> KernelValue:
        """A tensor with its dimensions in the order of the domain's rows and columns."""
        if not self.domain.channels_last or len(value.shape) != 4:
            return value
        if value.name in self.graph.producer and channels_moved(self.graph.producer[value.name]):
            return value
        shape, strides = (tuple(one[i] for i in LAST) for one in (value.shape, value.strides))
        return KernelValue(value.name, shape, value.dtype, strides)

    def operand(self, argument: Argument, like: tuple[int, ...]) -> Val:
        """A tensor or a number."""
        if isinstance(argument, bool | int | float):
            return self.number(float(argument))
        if not isinstance(argument, Arg):
            raise Unfusable("an argument is neither a tensor nor a number")
        if self.graph.base[argument.name] in self.inside:
            val = self._computed(argument.name)
            if not self._aligned(val, like):
                raise Unfusable("a member's rows are read as columns, or its columns as rows")
            return val
        part = self._part_of_whole(argument.name)
        return self._load(self.graph.values[argument.name], like) if part is None else part

    def _aligned(self, val: Val, like: tuple[int, ...]) -> bool:
        """Whether a result broadcasts to `like` along what it does not vary with.

        Numbers of elements do not tell: of [8, 8] a sum over rows and one over columns have eight.
        """
        if self.flat or prod(like) <= prod(val.shape):
            return True
        many = self.across(like)
        shape = (1,) * (len(like) - len(val.shape)) + val.shape
        if val.varies is Varies.ROW:
            return prod(shape[-many:]) == 1
        return val.varies is not Varies.COLUMN or prod(shape[:-many]) == 1

    def _part_of_whole(self, name: str) -> Val | None:
        """A part of a tensor that a member reads whole, so that nothing is loaded twice."""
        node = self.graph.producer.get(name)
        if node is None or node.op not in PARTS or not node.layout:
            return None
        source = next(node.refs())
        if source not in self.whole:
            return None
        try:
            value = self.graph.values[source]
            return self._viewed(node, name, self._load(value, self.seen(value).shape))
        except Unfusable:  # a part of its rows, say
            return None

    def _computed(self, name: str) -> Val:
        """A member's result, or a view of the result that only changes its shape."""
        if name in self.values:
            val = self.values[name]
            if any(self.micros[p].op == "sum_column" for p in val.pieces):
                raise Unfusable("a sum over all rows is known only when the kernel has ended")
            return val
        node = self.graph.producer[name]
        if not node.layout:
            raise Unfusable("a member is read before it is computed")
        source = self._computed(next(node.refs()))
        return self._viewed(node, name, source)

    def _viewed(self, node: KernelNode, name: str, x: Val) -> Val:
        shape, before = self.seen(self.graph.values[name]).shape, x.shape
        if self.domain.channels_last and channels_moved(node):
            return x._replace(shape=shape)
        if node.op in PARTS and shape != before:
            if self.domain.channels_last and len(before) == 4:
                raise Unfusable("a part of images is read")
            dim, start, end = part(node, name, before)
            if dim != len(before) - 1 or x.varies not in (Varies.FULL, Varies.COLUMN):
                raise Unfusable("a part of its rows is read")
            if node.arguments.get("step", 1) != 1 or start % self.width or end % self.width:
                raise Unfusable("a part of its columns is read that is no piece")
            return x._replace(shape=shape, pieces=x.pieces[start // self.width : end // self.width])
        if node.op in ("transpose", "t", "permute") and not still(node, before):
            raise Unfusable("a member is read transposed")
        if node.op in ("select", "as_strided", "unbind", "chunk"):
            raise Unfusable(f"a member is read through {node.op}")
        if self.flat or x.varies is Varies.ONE:
            return x._replace(shape=shape)
        return self._reshaped(x, shape)

    def across(self, shape: tuple[int, ...]) -> int:
        """How many of the last dimensions are the columns: those of an image may be together."""
        if shape and prod(shape) == self.rows * self.width and shape[-1] % self.width:
            for many in range(2, len(shape)):
                if prod(shape[-many:]) == self.width:
                    return many
        return 1

    def _reshaped(self, x: Val, shape: tuple[int, ...]) -> Val:
        """Another shape of the same rows and columns; expansions included."""
        columns, last = len(x.pieces) * self.width, prod(shape[-self.across(shape) :])
        full = bool(shape) and prod(shape) == self.rows * last
        if x.varies is Varies.FULL and full and last == columns:
            return x._replace(shape=shape)
        if x.varies is Varies.ROW and (
            prod(shape) == self.rows or (full and self._aligned(x, shape))
        ):
            return x._replace(shape=shape)
        if x.varies is Varies.COLUMN and shape and last == columns:
            return x._replace(shape=shape)
        raise Unfusable("a member is read in a shape of other rows and columns")

    def _load(self, value: KernelValue, like: tuple[int, ...]) -> Val:
        if value.dtype not in (*FLOATS, "bool"):
            raise Unfusable(f"it reads {value.dtype}")
        self.inputs[value.name] = value
        if value.elements == 1:
            pieces = (self._loaded(value, Place((), (), 0, 0), Varies.ONE),)
            return Val(value.shape, Varies.ONE, pieces)
        if self.flat:
            if value.elements != self.width or not value.contiguous:
                raise Unfusable("a tensor is broadcast or has gaps")
            place = Place((), (), 1, 0)
            return Val(value.shape, Varies.FULL, (self._loaded(value, place, Varies.FULL),))
        return self._broadcast(self.seen(value), like)

    def _broadcast(self, value: KernelValue, like: tuple[int, ...]) -> Val:
        missing = len(like) - len(value.shape)
        if missing < 0:
            raise Unfusable("a tensor has more dimensions than the result")
        shape = (1,) * missing + value.shape
        strides = (0,) * missing + tuple(
            0 if n == 1 else s for n, s in zip(value.shape, value.strides, strict=True)
        )
        kind = self.kind(like)
        lead, step, columns = like, 0, 1
        if kind in (Varies.FULL, Varies.COLUMN):
            many = self.across(like)
            if shape[-1] not in (1, like[-1]):
                raise Unfusable("a tensor does not broadcast to the result")
            lead, columns = like[:-many], prod(like[-many:])
            strides, step = strides[:-many], together(like[-many:], strides[-many:])
        by_row = kind is not Varies.COLUMN and (any(strides) or self.rows == 1)
        by_column = step != 0
        varies = {
            (True, True): Varies.FULL,
            (True, False): Varies.ROW,
            (False, True): Varies.COLUMN,
            (False, False): Varies.ONE,
        }[by_row, by_column]
        sizes, strides = collapsed(lead, strides) if by_row else ((), ())
        many = columns // self.width if by_column else 1
        pieces = tuple(
            self._loaded(value, Place(sizes, strides, step, p * self.width * step), varies)
            for p in range(many)
        )
        return Val(like, varies, pieces)

    def _loaded(self, value: KernelValue, place: Place, varies: Varies) -> int:
        op = {"bool": "load_bool", "int64": "load_int"}.get(value.dtype, "load")
        return self._add(Micro(op, (), varies, source=value.name, place=place))

    def kind(self, shape: tuple[int, ...]) -> Varies:
        """What a tensor of this shape varies with, in this domain."""
        if prod(shape) == 1 and not self.flat:
            return Varies.ONE if self.rows > 1 else Varies.ROW
        last = prod(shape[-self.across(shape) :]) if shape else 1
        if last % self.width == 0 and prod(shape) == self.rows * last:
            return Varies.FULL
        if last % self.width == 0 and prod(shape) == last:
            return Varies.COLUMN
        if prod(shape) == self.rows:
            return Varies.ROW
        raise Unfusable("its shape has other rows and columns")

    def stored(self, value: KernelValue) -> list[OutputPiece]:
        """How an output is written."""
        val, value = self.values[value.name], self.seen(value)
        if value.dtype not in (*FLOATS, "bool"):
            raise Unfusable(f"it gives {value.dtype}")
        if any(n > 1 and s == 0 for n, s in zip(value.shape, value.strides, strict=True)):
            raise Unfusable("it gives a tensor whose elements share memory")
        if self.flat:
            if not value.contiguous or value.elements != self.width:
                raise Unfusable("a tensor has gaps")
            return [OutputPiece(value, val.pieces[0], Place((), (), 1, 0), Varies.FULL)]
        own = {Varies.ROW: self.rows, Varies.COLUMN: len(val.pieces) * self.width}
        kind = val.varies if own.get(val.varies) == value.elements else self.kind(value.shape)
        if kind is Varies.ONE:
            raise Unfusable("it gives a single number")
        lead, strides, step = value.shape, value.strides, 0
        wide = self.across(value.shape)
        if kind in (Varies.FULL, Varies.COLUMN):
            lead, strides = value.shape[:-wide], value.strides[:-wide]
            step = together(value.shape[-wide:], value.strides[-wide:])
        sizes, strides = collapsed(lead, strides) if kind is not Varies.COLUMN else ((), ())
        many = prod(value.shape[-wide:]) // self.width if kind is not Varies.ROW else 1
        pieces = val.pieces if len(val.pieces) == many else val.pieces * many
        return [
            OutputPiece(value, micro, Place(sizes, strides, step, i * self.width * step), kind)
            for i, micro in enumerate(pieces)
        ]
