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

from bigplan.kernels import moments, turning
from bigplan.spec.moments import BLOCK, FIRST_BITS, SECOND_BITS

HOPPER = GPUTarget("cuda", 90, 32)


class _Kernel(NamedTuple):
    function: Any
    types: Mapping[str, str]  # of arguments that are no 32-bit integers
    constants: Mapping[str, object]


def _kernels() -> Iterator[_Kernel]:
    """Those that have been written since this test, by their dtypes."""
    for dtype in ("*bf16", "*fp32"):
        for interleaved in (True, False):
            sizes = {"INTERLEAVED": interleaved, "HALF": 32, "COLUMNS": 32, "HEADS": turning.HEADS}
            wide = sizes | {"PLAIN": 128, "WIDE": 128}
            angles = {"cos": "*fp32", "sin": "*fp32"}
            joined = dict.fromkeys(("plain", "shared", "keys"), dtype)
            parted = dict.fromkeys(("by_keys", "by_plain", "by_shared"), dtype)
            for back in (True, False):
                yield _Kernel(turning._turn, {"x": dtype} | angles, sizes | {"BACK": back})
            yield _Kernel(turning._join, joined | angles, wide)
            yield _Kernel(turning._part, parted | angles, wide)
        for first, second in (("*bf16", "*bf16"), ("*i8", "*u8")):
            fp32 = ("p", "m_scales", "v_scales", "m_table", "v_table", "factors")
            types = dict.fromkeys(fp32, "*fp32") | {"g": dtype, "m": first, "v": second}
            constants = {
                "CODED": first == "*i8",
                "COPY": True,
                "ROWS": moments.ROWS,
                "BLOCK": BLOCK,
            }
            constants |= {"FACTORS": moments.FACTORS}
            constants |= {"FIRST_BITS": FIRST_BITS, "SECOND_BITS": SECOND_BITS}
            yield _Kernel(moments._adamw, types | {"copy": "*bf16", "starts": "*i64"}, constants)


def main() -> None:
    """Compile all to a GPU's code; the first that fails ends it."""
    for function, types, constants in _kernels():
        names = function.arg_names
        signature = {name: types.get(name, "i32") for name in names}
        signature |= dict.fromkeys(constants, "constexpr")
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=function, signature=signature, constexprs=places)
        compiled = triton.compile(source, target=HOPPER)
        print(function.__name__, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
