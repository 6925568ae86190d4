"""What the runtime does the same way for every plan: the choices that are in no plan.

A plan says where tensors live, what is recomputed, how long the rings of layers are and how much of
the loss is computed at a time. All else that costs time or memory and that somebody chose stands
here, for the runtime that does it and for the graph, the program and the prices that count it.

Rules that are no numbers stand with what follows them:

    order.Waits, order.PACED   what an action waits for, in the runtime as in the simulator
    lanes.SHARED               which lanes are one thread
    Gpu.runs_kernels           CUDA devices run generated kernels, unless the plan asks for torch's
    price.memory_of_torch      the GPU memory that torch is held to

Machines are no choice: their figures are in cluster and hardware files. Tiles of kernels, blocks of
checksums and the like change neither a price nor a promise, and stay where they are used.
"""

from __future__ import annotations

from fractions import Fraction

# --- Lanes (runtime/lanes.py, turns.py): how far Python and copies run ahead of the device.

# Actions that a lane queues ahead of the device: 13 ms where chunks of state pass through.
ACTIONS_AHEAD = 8
# Of chunks of state on their way to the GPU: the next is queued when the one before has arrived,
# which takes 0.1 ms more a chunk. The rates of passing state are measured so.
CHUNKS_AHEAD = 1
# Activations leave in pieces where chunks leave beside them, and so many pieces are queued as long
# as no chunk waits to leave.
PIECE_BYTES = 128 << 20  # 2.5 ms of the engine
PIECES_AHEAD = 2
# A thread that asks for the interpreter gets it after so long at most. Python's 5 ms are three
# times what a chunk of streamed state (64 MiB) takes to copy.
SWITCH_SECONDS = 0.0005

# --- Rings that every program has at these lengths (lower/entries.py). Placement has the others.

STAGING = 2  # host staging entries: one moves while the other is used
CHUNK_STAGING = 3  # state chunks in host memory: one arrives, one is updated, one leaves
# Of state that passes through the GPU a chunk is so many times smaller than of NVMe's: PCIe is as
# fast with 64 MiB, and a ring of them takes less of the GPU.
STREAMED_CHUNKS = 4
# State chunks that pass through the GPU: one arrives, one is updated, one leaves, one for jitter. A
# kernel of products has all of a GPU until it ends, whatever the priority of what waits. Chunks
# that arrive meanwhile need entries, or their way stands still.
STREAMING, MOST_STREAMING = 4, 12
# Operations in the time of a byte to the GPU: 700 TFLOP/s beside 50 GB/s (H200), more than others.
OPERATIONS_A_BYTE = 14_000

# --- The GPU's memory beside its buffers.

ALIGNMENT = 256  # bytes of an entry: as wide as any load of a GPU, and what cuBLAS needs at most
# Of a CUDA graph: 384 of blocks' passes took 72 MB (benchmarks/results/2026-11-24-h200-graphs).
GRAPH_BYTES = 200_000
MOST_GRAPHS = 4096  # of a step: 0.8 GB, and 5 s to capture
LOOKED_UP_ROWS = 2048  # whose gradients are added at a time, by a square of ones and zeros
# Elements of 16-bit gradients that an update widens to fp32 at once: an H200 updated 18 / 66 / 99
# G/s for 2^20 / 22 / 24.
WIDENED_ELEMENTS = 2**24


def sums_in_products(gradient_bytes: int) -> bool:
    """Whether products add weights' gradients to their sums, of so many bytes an element.

    To fp32 ones. A sum in 16 bits takes the gradients that autograd makes. The CPU has no such
    product: there a gradient is a tensor of its own either way.
    """
    return gradient_bytes == 4


def repeats_heads(element_bytes: int, heads: int, kv_heads: int) -> bool:
    """Whether attention repeats keys and values for each query head, and saves them so.

    CUDA's flash and cuDNN kernels are for half precisions; its fp32 kernel has no grouped heads,
    and torch would take the unfused path, which saves s x s probabilities. The CPU does the same,
    so that a plan counts one number of bytes on every device.
    """
    return element_bytes == 4 and heads != kv_heads


# Columns that attention with linear biases appends to its heads (runtime/alibi.py), of which it
# uses six: rows of 16-bit numbers stay multiples of 16 bytes.
ALIBI_COLUMNS = 8

# --- The CPU's cores (runtime/cores.py).

# Of the cores, beside copies of a GPU. AdamW by all cores is no faster: three quarters of them use
# all of the memory's rate. But copies to the host wait longer for memory, and lanes wait for a
# core. 16, 14 and 12 threads of 16 cores left the GPU waiting 0.12, 0.08 and 0.06 s a step
# (benchmarks/LOG.md). `adam_rate_beside_copies` is measured so.
CORES_BESIDE_COPIES = Fraction(3, 4)
# Below the threads that queue copies and kernels, which take a core for microseconds at a time and
# hold up the GPU for as long as they wait for one.
NICE = 10
# Elements that a core takes at once through torch's kernels, where nothing could be compiled. Of an
# update: on an H200 machine 2^19 / 20 / 21 gave 1.8 / 2.6 / 2.8 G/s on 16 cores; small ones wait
# for the interpreter (measured as in runtime/cores.py).
UPDATED_ELEMENTS = 2**21
# Of sums, and of squares, which are added in fp32, and these sums in fp64.
SUMMED_ELEMENTS = 2**22
# Of rows' gradients, added up in host memory: 4 MB in fp32, which the C library keeps. 17 MB and
# more were mapped anew every time: 96 to 210 ms for 4,096 rows of 4096 on two cores, in place of 18
# to 21 (benchmarks/host_rows.py).
ROW_ELEMENTS = 2**20

# --- Drives and checkpoints (runtime/disk.py, checkpoint/).

PAGE = 4096  # bytes: O_DIRECT moves whole pages, and entries in host memory begin at one
# Bytes of a transfer. Large enough that a drive's per-request cost (about 100 us) is lost in it (4
# ms at 2 GB/s), small enough that a 100 MB extent keeps all the threads busy.
TRANSFER_BYTES = 8 << 20
DISK_THREADS = 4  # transfers of a file under way; a checkpoint has as many of its own
CHECKPOINT_STAGING = DISK_THREADS * TRANSFER_BYTES  # bytes of an entry: all of them at once

# --- Data (runtime/data.py).

# Batches read before their turn, two at least: bytes of ordinary memory, and how many.
READ_AHEAD_BYTES, MOST_READ_AHEAD = 4 << 20, 64
