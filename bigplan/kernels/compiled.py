"""What Triton and NVIDIA's assembler make of a kernel, without a GPU: registers and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigplan.cost.kernel import Tile
from bigplan.errors import InputError
from bigplan.kernels.fusion.body import Body
from bigplan.kernels.fusion.source import source

POINTERS = {"bf16": "*bf16", "fp32": "*fp32", "fp16": "*fp16", "bool": "*i8", "int64": "*i64"}


@dataclass(frozen=True)
class Compiled:
    """A kernel for a compute capability."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack: registers that did not fit
    shared: int  # bytes of shared memory
    wide_loads: int  # loads and stores of 16 bytes


def compile_for(body: Body, tile: Tile, capability: str) -> Compiled:
    """Compile a kernel for a GPU that need not be here. Raises InputError in the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from bigplan.kernels.launch import compiled

    function = compiled(source(body, tile))
    if not isinstance(function, JITFunction):
        raise InputError("Triton interprets kernels here; unset TRITON_INTERPRET to compile them")
    sums = {s.value.name for s in body.stores if body.micros[s.micro].op == "sum_column"}
    types = {f"in{i}": POINTERS[v.dtype] for i, v in enumerate(body.inputs)}
    for i, value in enumerate(body.outputs):
        types[f"out{i}"] = "*fp32" if value.name in sums else POINTERS[value.dtype]
    aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    made = triton.compile(
        ASTSource(fn=function, signature=types, constexprs={}, attrs=aligned),
        target=GPUTarget("cuda", int(capability.replace(".", "")), 32),
        options={"num_warps": tile.warps},
    )
    registers, stack = _resources(made.asm["cubin"])
    wide = made.asm["ptx"].count(".v4.b32")
    return Compiled(registers, stack, int(made.metadata.shared), wide)


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and stack of the only kernel in a binary, by the disassembler beside Triton."""
    import triton.backends.nvidia as backend

    tool = Path(backend.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        printed = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])
