"""Kernels written by hand, compiled for a GPU that need not be there: a program of its own.

Triton's interpreter, which other tests use, runs what its compiler refuses. It is chosen for a
whole process, so `python -m tests.kernels.compiled` is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bigplan.kernels.handwritten import (
    attention,
    attention_programs,
    delta_rule,
    delta_rule_backward,
    delta_rule_programs,
    dropout,
    moments,
    short_filters,
    turning,
)
from bigplan.kernels.handwritten.attention import Tile
from bigplan.spec.moments import BLOCK, FIRST_BITS, SECOND_BITS

WIDE = ("*bf16", "*fp32", "*i32", "i32")
HOPPER = GPUTarget("cuda", 90, 32)


class _Kernel(NamedTuple):
    function: Any
    types: Mapping[str, str]  # of arguments that are no 32-bit integers
    constants: Mapping[str, object]
    tile: Tile | None = None  # how it is launched


def _kernels() -> Iterator[_Kernel]:
    """Those that have been written since this test, by their dtypes."""
    for dtype, interleaved in (("*bf16", True), ("*fp32", False)):
        sizes = {"INTERLEAVED": interleaved, "HALF": 32, "COLUMNS": 32, "HEADS": turning.HEADS}
        wide = sizes | {"PLAIN": 128, "WIDE": 128}
        angles = {"cos": "*fp32", "sin": "*fp32"}
        joined = dict.fromkeys(("plain", "shared", "keys"), dtype)
        parted = dict.fromkeys(("by_keys", "by_plain", "by_shared"), dtype)
        for back in (True, False):
            yield _Kernel(turning._turn, {"x": dtype} | angles, sizes | {"BACK": back})
        yield _Kernel(turning._join, joined | angles, wide)
        yield _Kernel(turning._part, parted | angles, wide)
    for gradients, first, second in (("*fp32", "*bf16", "*bf16"), ("*bf16", "*i8", "*u8")):
        fp32 = ("p", "m_scales", "v_scales", "m_table", "v_table", "factors")
        types = dict.fromkeys(fp32, "*fp32") | {"g": gradients, "m": first, "v": second}
        constants = {
            "CODED": first == "*i8",
            "COPY": True,
            "ROWS": moments.ROWS,
            "BLOCK": BLOCK,
        }
        constants |= {"FACTORS": moments.FACTORS}
        constants |= {"FIRST_BITS": FIRST_BITS, "SECOND_BITS": SECOND_BITS}
        yield _Kernel(moments._adamw, types | {"copy": "*bf16", "starts": "*i64"}, constants)


def _dropout() -> Iterator[_Kernel]:
    """Words of two sizes, as launches have them by their values."""
    for dtype, words, adds in (("*bf16", "i64", False), ("*fp32", "i32", True)):
        types = {"x": dtype, "out": dtype, "first": "*i64"}
        types |= dict.fromkeys(("of_rows", "of_columns", "least"), words)
        sizes = {"ADDS": adds, "ROWS": dropout.ROWS, "COLUMNS": dropout.COLUMNS}
        yield _Kernel(dropout._dropped, types, sizes)


def _attention() -> Iterator[_Kernel]:
    """Attention that keeps documents apart within a window, heads of 128."""
    names = ("q", "k", "v", "out", "gradient", "by_q", "by_k", "by_v")
    types = dict.fromkeys(names, "*bf16") | dict.fromkeys(("slopes", "lse", "deltas"), "*fp32")
    types |= {"bounds": "*i32", "factor": "fp32", "scale": "fp32"}
    kernels = attention_programs.result, attention_programs.by_queries, attention_programs.by_keys
    for function, tile in zip(kernels, attention.HOPPER[128], strict=True):
        constants: dict[str, object] = {"WINDOWED": True, "APART": True, "CAP": 0.0}
        constants |= {"QUERIES": tile.queries, "KEYS": tile.keys, "WIDTH": 128, "D": 128}
        if function is attention_programs.by_keys:
            constants["GROUPS"] = 4
        yield _Kernel(function, types, constants, tile)


def _delta_rule() -> Iterator[_Kernel]:
    """Those with most products, of keys of 96 columns and values of 64; a convolution's last."""
    fp32 = ("rate", "reach", "by_reach", "by_rate", "by_filters", "most")
    sizes: dict[str, object] = {"EACH": 2, "KEYS": 96, "VALUES": 64, "C": 64}
    parts: dict[str, object] = {"PARTS": 2, "BLOCK": 64}
    sums: dict[str, object] = {"TAPS": 4, "ROWS": 32, "TOKENS": 256, "WIDTH": 128, "USED": 96}
    system = {"KEEP": True, "DOUBLINGS": 6, "DOCUMENTS": True}
    for function, constants in (
        (delta_rule_programs.solved, sizes | parts | system),
        (delta_rule_backward.walked_back, sizes | {"K": 128, "BLOCK": 32}),
        (delta_rule_backward.unsolved, sizes | parts),
        (short_filters._by_filters, sums | {"BIAS": True, "DOCUMENTS": True}),
    ):
        numbers = ("length", "heads", "begins", *constants, *fp32)
        narrow = [name for name in function.arg_names if name not in numbers]
        types = dict.fromkeys(narrow, "*bf16") | dict.fromkeys(fp32, "*fp32")
        types |= {"begins": "*i32", "most": "fp32"}
        how = delta_rule.LAUNCHES.get(function.__name__, delta_rule.Launch(short_filters.WARPS))
        yield _Kernel(function, types, constants, Tile(64, 64, how.warps, how.stages))


def main() -> None:
    """Compile all to a GPU's code; the first that fails ends it."""
    for function, types, constants, tile in (
        *_kernels(),
        *_dropout(),
        *_attention(),
        *_delta_rule(),
    ):
        names = function.arg_names
        signature = {name: types.get(name, "i32") for name in names}
        signature |= dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        # As launched with addresses and lengths that are multiples of 16: loads are wide.
        wide = [names.index(name) for name, kind in signature.items() if kind in WIDE]
        attributes = {(place,): [["tt.divisibility", 16]] for place in wide} if tile else None
        source = ASTSource(function, signature, constexprs=places, attrs=attributes)
        options = {"num_warps": tile.warps, "num_stages": tile.stages} if tile else None
        compiled = triton.compile(source, target=HOPPER, options=options)
        print(function.__name__, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
