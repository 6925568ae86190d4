"""Triton source of a kernel: one generator, five ways to walk over rows and columns.

Tiles are [rows, columns]; what varies with the row alone is [rows, 1], with the column
[1, columns]. Sizes and strides are literals: a kernel belongs to its shapes. Offsets are 64 bits
wide where a tensor spans 2^30 elements or more, and 32 where these are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from bigplan.cost.kernel import Shape, Tile
from bigplan.kernels.fusion.body import ROW_REDUCTIONS, Body, Micro, OutputPiece, Place, Varies
from bigplan.kernels.fusion.fuse import levels
from bigplan.kernels.fusion.graph import KernelValue

# 2 / (1 + exp(-2x)) - 1 loses its digits near 0; there three terms of its series have 5e-8.
TANH = (
    "tl.where(tl.abs({0}) < 0.1,"
    " {0} * (1.0 - {0} * {0} * (0.33333334 - {0} * {0} * 0.13333334)),"
    " 2.0 * tl.sigmoid(2.0 * {0}) - 1.0)"
)
WRITTEN = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})", "reciprocal": "1.0 / {0}", "sigmoid": "tl.sigmoid({0})",
    "tanh": TANH, "erf": "tl.erf({0})", "abs": "tl.abs({0})",
    "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "gt": "{0} > {1}", "lt": "{0} < {1}", "ge": "{0} >= {1}", "le": "{0} <= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "where": "tl.where({0}, {1}, {2})",
    "not": "{0} == 0", "and": "{0} & {1}", "widen": "{0}.to(tl.float32)",
    "round_bf16": "{0}.to(tl.bfloat16).to(tl.float32)",
    "round_fp16": "{0}.to(tl.float16).to(tl.float32)",
}  # fmt: skip
LEAST = "float('-inf')"
# Below every logit: in a running sum of exponentials -inf minus itself would be no number.
LOW = "-1e30"
FILL = {"sum_row": "0.0", "max_row": LEAST, "lse_row": LOW}  # what leaves the result alone
HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


def source(body: Body, tile: Tile, *, counted: bool = False) -> str:
    """The text of a module whose function `kernel` takes the body's inputs, then its outputs.

    `counted`: then how many elements there are, in place of the width of a body that has one row.
    Outputs that are sums over rows are buffers [programs, columns] of fp32, added up afterwards.
    """
    return _Writer(body, tile, counted).text()


class _Writer:
    def __init__(self, body: Body, tile: Tile, counted: bool) -> None:
        self.body, self.tile, self.counted = body, tile, counted
        assert not counted or (body.rows == 1 and tile.shape is Shape.FLAT), tile
        self.levels = levels(body)
        self.lines: list[str] = []
        self.depth = 1
        self.pointers = {v.name: f"in{i}" for i, v in enumerate(body.inputs)}
        self.targets = {v.name: f"out{i}" for i, v in enumerate(body.outputs)}
        # Elements, their strides and the padding of tiles all stay below twice the largest span.
        self.wide = max(_span(v) for v in (*body.inputs, *body.outputs)) >= 2**30
        self.exact_columns = body.width % tile.columns == 0 and not counted
        self.turns = ceil(ceil(body.rows / tile.rows) / tile.programs) if tile.programs else 1
        covered = tile.rows * (self.turns * tile.programs if tile.programs else 1)
        self.exact_rows = body.rows % covered == 0
        self.rows_named: dict[tuple[int, ...], list[str]] = {}
        self.hint = ""  # to the caches, of loads of whole tiles

    def text(self) -> str:
        names = ", ".join([*self.pointers.values(), *self.targets.values()])
        names += ", count" * self.counted
        self._prologue()
        {
            Shape.FLAT: self._flat,
            Shape.ROW: self._flat,
            Shape.LOOPED: self._looped,
            Shape.STRIP: self._strip,
            Shape.TWICE: self._strip,
        }[self.tile.shape]()
        return f"{HEADER}def kernel({names}):\n" + "\n".join(self.lines) + "\n"

    def say(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # --- Where a program is.

    def _prologue(self) -> None:
        body, tile = self.body, self.tile
        across = -(-body.width // tile.columns)
        cast = ".to(tl.int64)" if self.wide else ""
        self.say(f"program = tl.program_id(0){cast}")
        if self.counted:
            first = f"program * {tile.columns}"
        elif tile.shape is Shape.LOOPED or across == 1:
            self.say("down = program")
            first = "0"
        else:
            self.say(f"down = program // {across}")
            first = f"program % {across} * {tile.columns}"
        if tile.shape is not Shape.LOOPED:
            self._columns(first)
        if not tile.strip and not self.counted:
            self._rows(f"down * {tile.rows}")

    def _columns(self, first: str) -> None:
        wide = ".to(tl.int64)" if self.wide else ""
        self.say(f"c = ({first} + tl.arange(0, {self.tile.columns})){wide}[None, :]")
        if not self.exact_columns:
            self.say(f"in_c = c < {'count' if self.counted else self.body.width}")

    def _rows(self, first: str) -> None:
        self.rows_named = {}
        if self.body.rows == 1 and self.tile.rows == 1:
            return
        self.say(f"r = ({first} + tl.arange(0, {self.tile.rows}))[:, None]")
        if not self.exact_rows:
            self.say(f"in_r = r < {self.body.rows}")

    def _split(self, sizes: tuple[int, ...]) -> list[str]:
        """Names of the row's place in each of these dimensions."""
        if sizes not in self.rows_named:
            parts, below = [], 1
            for size in reversed(sizes):
                part = "r" if below == 1 else f"r // {below}"
                below *= size
                parts.append(part if below >= self.body.rows else f"({part}) % {size}")
            self.rows_named[sizes] = parts[::-1]
        return self.rows_named[sizes]

    def _at(self, pointer: str, place: Place, varies: Varies) -> str:
        terms = [pointer]
        if place.offset:
            terms.append(str(place.offset))
        for part, stride in zip(self._split(place.sizes), place.strides, strict=True):
            if stride:
                terms.append(f"({part}) * {stride}" if stride != 1 else f"({part})")
        if varies in (Varies.FULL, Varies.COLUMN) and place.step:
            terms.append("c" if place.step == 1 else f"c * {place.step}")
        return " + ".join(terms)

    def _mask(self, varies: Varies) -> str:
        masks = []
        by_row = self.body.rows > 1 or self.tile.rows > 1
        if varies in (Varies.FULL, Varies.ROW) and not self.exact_rows and by_row:
            masks.append("in_r")
        if varies in (Varies.FULL, Varies.COLUMN) and not self.exact_columns:
            masks.append("in_c")
        return " & ".join(masks)

    # --- Operations.

    def _write(self, index: int) -> None:
        micro = self.body.micros[index]
        self.say(f"v{index} = {self._expression(micro)}")

    def _expression(self, micro: Micro) -> str:
        if micro.op == "number":
            return _literal(micro.number)
        if micro.op.startswith("load"):
            assert micro.place is not None
            mask = self._mask(micro.varies)
            masked = f", mask={mask}, other=0" if mask else ""
            at = self._at(self.pointers[micro.source], micro.place, micro.varies)
            hint = self.hint if micro.varies is Varies.FULL else ""
            loaded = f"tl.load({at}{masked}{hint})"
            if micro.op == "load_bool":
                return f"{loaded} != 0"
            if micro.op == "load_int":
                return loaded
            return f"{loaded}.to(tl.float32)"
        if micro.op == "column":
            return "c"
        names = [f"v{a}" for a in micro.arguments]
        if micro.op == "gather":
            return self._gathered(micro, names[0])
        if micro.op in ROW_REDUCTIONS:
            return self._reduced(micro, self._inside(micro, names[0]))
        return WRITTEN[micro.op].format(*(f"({n})" if n.startswith("-") else n for n in names))

    def _gathered(self, micro: Micro, column: str) -> str:
        assert micro.place is not None
        at = self._at(self.pointers[micro.source], micro.place, Varies.ROW)
        masks = [f"({column} >= 0)", f"({column} < {self.body.width})", self._mask(Varies.ROW)]
        mask = " & ".join(filter(None, masks))
        at += f" + {column}" + ("" if micro.place.step == 1 else f" * {micro.place.step}")
        return f"tl.load({at}, mask={mask}, other=0).to(tl.float32)"

    def _inside(self, micro: Micro, name: str) -> str:
        """The reduced value, with the neutral element beyond the columns."""
        if self.exact_columns:
            return name
        return f"tl.where(in_c, {name}, {FILL[micro.op]})"

    def _reduced(self, micro: Micro, inside: str, total: str = "") -> str:
        """The result of a row, of its values or, of exponentials, of maxima and their `total`."""
        if micro.op != "lse_row":
            return f"tl.{'sum' if micro.op == 'sum_row' else 'max'}({inside}, 1)[:, None]"
        top = f"tl.max({inside}, 1)[:, None]"
        powers = f"tl.exp({inside} - {top})" + (f" * {total}" if total else "")
        return f"{top} + tl.log(tl.sum({powers}, 1)[:, None])"

    def _accumulate(self, index: int) -> None:
        """Adds a tile to what a row's reduction has so far, column by column."""
        micro = self.body.micros[index]
        inside = self._inside(micro, f"v{micro.arguments[0]}")
        if micro.op == "sum_row":
            self.say(f"a{index} = a{index} + {inside}")
        elif micro.op == "max_row":
            self.say(f"a{index} = tl.maximum(a{index}, {inside})")
        else:
            self.say(f"x{index} = {inside}")
            self.say(f"n{index} = tl.maximum(a{index}, x{index})")
            self.say(
                f"t{index} = t{index} * tl.exp(a{index} - n{index}) + tl.exp(x{index} - n{index})"
            )
            self.say(f"a{index} = n{index}")

    def _store(self, store: OutputPiece) -> None:
        mask = self._mask(store.varies)
        if store.varies is Varies.COLUMN and self.body.rows > self.tile.rows:
            # The first rows' program alone: all 3,136 at once took 30 of 139 us on an H100.
            first = "(down + turn == 0)" if self.tile.strip else "(down == 0)"
            mask = f"{mask or '(c >= 0)'} & {first}"  # a mask has the columns' shape
        masked = f", mask={mask}" if mask else ""
        pointer = self.targets[store.value.name]
        value = f"v{store.micro}"
        if self.body.micros[store.micro].op == "number":
            value = f"tl.full([1, 1], {value}, tl.float32)"
        if store.varies is Varies.FULL:
            value = f"tl.broadcast_to({value}, [{self.tile.rows}, {self.tile.columns}])"
        elif store.varies is Varies.ROW:
            value = f"tl.broadcast_to({value}, [{self.tile.rows}, 1])"
        kind = "tl.int8" if store.value.dtype == "bool" else f"{pointer}.dtype.element_ty"
        at = self._at(pointer, store.place, store.varies)
        if store.varies is Varies.ROW and self.body.rows == 1:
            at += " + tl.zeros([1, 1], tl.int32)"  # a block, as the value is
        self.say(f"tl.store({at}, {value}.to({kind}){masked})")

    # --- Ways to walk.

    def _flat(self) -> None:
        for index in range(len(self.body.micros)):
            self._write(index)
        for store in self.body.stores:
            self._store(store)

    def _looped(self) -> None:
        """A pass for each level of reductions, then one that writes."""
        micros = self.body.micros
        done: set[int] = set()
        for level in range(1, max(self.levels) + 1):
            self._outside(done, level - 1)
            ends = [i for i in self.body.row_reductions if self.levels[i] == level]
            shape = f"[{self.tile.rows}, {self.tile.columns}]"
            for i in ends:
                self.say(f"a{i} = tl.full({shape}, {FILL[micros[i].op]}, tl.float32)")
                if micros[i].op == "lse_row":
                    self.say(f"t{i} = tl.zeros({shape}, tl.float32)")
            self._loop()
            for i in self._needed([micros[i].arguments[0] for i in ends], done):
                self._write(i)
            for i in ends:
                self._accumulate(i)
            self.depth -= 1
            for i in ends:
                total = f"t{i}" if micros[i].op == "lse_row" else ""
                self.say(f"v{i} = {self._reduced(micros[i], f'a{i}', total)}")
            done.update(ends)
        self._outside(done, max(self.levels))
        by_row = [s for s in self.body.stores if s.varies is Varies.ROW]
        for store in by_row:
            self._store(store)
        rest = [s for s in self.body.stores if s.varies is not Varies.ROW]
        if rest:
            self._loop()
            for i in self._needed([store.micro for store in rest], done):
                self._write(i)
            for store in rest:
                self._store(store)
            self.depth -= 1

    def _loop(self) -> None:
        self.say(f"for first in range(0, {self.body.width}, {self.tile.columns}):")
        self.depth += 1
        self._columns("first")

    def _outside(self, done: set[int], level: int) -> None:
        """Writes values that do not vary with the column and need no later reduction."""
        for i, micro in enumerate(self.body.micros):
            steady = micro.varies in (Varies.ROW, Varies.ONE) and self.levels[i] <= level
            ready = steady and i not in done and all(a in done for a in micro.arguments)
            if ready and micro.op not in ROW_REDUCTIONS:
                self._write(i)
                done.add(i)

    def _needed(self, wanted: Iterable[int], done: set[int]) -> list[int]:
        """Operations that lead to these and are not there yet, in order."""
        found, stack = set(), list(wanted)
        while stack:
            i = stack.pop()
            if i not in found and i not in done:
                found.add(i)
                stack += self.body.micros[i].arguments
        return sorted(found)

    def _strip(self) -> None:
        """Down the rows: values of a column are read once, and sums stay in registers."""
        body, tile = self.body, self.tile
        micros = body.micros
        steady = [
            i
            for i, m in enumerate(micros)
            if m.varies in (Varies.COLUMN, Varies.ONE) and m.op != "sum_column"
        ]
        for i in steady:
            self._write(i)
        sums = body.of("sum_column")
        for i in sums:
            self.say(f"a{i} = tl.zeros([{tile.rows}, {tile.columns}], tl.float32)")
        stages = f", num_stages={tile.stages}" if tile.stages > 1 else ""
        self.say(f"for turn in tl.range(0, {self.turns}{stages}):")
        self.depth += 1
        self._rows(f"(down * {self.turns} + turn) * {tile.rows}")
        known = set(steady)
        if tile.shape is Shape.TWICE:
            self._reduce_first(known)
        for i, micro in enumerate(micros):
            if i not in known and micro.op != "sum_column":
                self._write(i)
        self.hint = ""
        for store in body.stores:
            if micros[store.micro].op != "sum_column":
                self._store(store)
        mask = self._mask(Varies.FULL)
        for i in sums:
            value = f"v{micros[i].arguments[0]}"
            self.say(f"a{i} += tl.where({mask}, {value}, 0.0)" if mask else f"a{i} += {value}")
        self.depth -= 1
        self._store_sums()

    def _reduce_first(self, known: set[int]) -> None:
        """What does not vary with the column, one level of reductions after another.

        Each level reads its rows anew, and so will what follows: tiles of a wide row, held until
        the row is reduced, leave no registers for the sums of columns.
        """
        micros = self.body.micros
        self.hint = ", eviction_policy='evict_last'"
        for level in range(1, max(self.levels) + 1):
            ends = [i for i in self.body.row_reductions if self.levels[i] == level]
            for i in self._needed(ends, known):
                self._write(i)
                if micros[i].varies is Varies.ROW:
                    known.add(i)
        # Another hint, or the compiler takes both loads for one.
        self.hint = ", eviction_policy='evict_first'"

    def _store_sums(self) -> None:
        body, micros = self.body, self.body.micros
        masked = ", mask=in_c" if not self.exact_columns else ""
        for store in body.stores:
            if micros[store.micro].op == "sum_column":
                columns = store.value.shape[-1]
                piece = store.place.offset // max(1, store.place.step)
                at = f"{self.targets[store.value.name]} + down * {columns} + {piece} + c"
                self.say(f"tl.store({at}, tl.sum(a{store.micro}, 0)[None, :]{masked})")


def _span(value: KernelValue) -> int:
    """Elements from the first to past the last."""
    return 1 + sum((n - 1) * abs(s) for n, s in zip(value.shape, value.strides, strict=True) if n)


def _literal(number: float) -> str:
    if number != number:
        return "float('nan')"
    if number in (float("inf"), float("-inf")):
        return f"float('{number}')"
    return repr(float(number))
