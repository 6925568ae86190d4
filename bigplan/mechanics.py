"""What the runtime does the same way for every plan: the choices that are in no plan.

A plan says where tensors live and what is recomputed. It also gives the length of the rings of
layers, and how much of the loss is computed at a time. All other choices that cost time or memory
are here. The runtime carries them out; the graph, the program and the prices count them.

Rules that are not numbers are with the code that follows them:

    order.Waits, order.PACED   what an action waits for, in the runtime as in the simulator
    lanes.thread_of            which lanes are one thread
    Gpu.runs_kernels           CUDA devices run generated kernels, unless the plan asks for torch's
    price.memory_of_torch      the GPU memory that torch is held to

Figures of machines are not choices: they are in cluster and hardware files. Tiles of kernels,
blocks of checksums and the like change neither a price nor a promise, so they stay where they are
used.
"""

from __future__ import annotations

from fractions import Fraction

# --- Lanes (runtime/execution/): how far Python and copies run ahead of the device.

# Actions that a lane queues ahead of the device. Where chunks of state pass through the GPU, 8 of
# them are 13 ms of work.
ACTIONS_AHEAD = 8
# Chunks of state queued on their way to the GPU. The next chunk is queued once the previous one has
# arrived, which costs 0.1 ms a chunk. The rates of streamed state are measured with this limit.
CHUNKS_AHEAD = 1
# Where activations and chunks of state leave the GPU at the same time, activations leave in pieces.
# As long as no chunk waits to leave, PIECES_AHEAD pieces are queued.
PIECE_BYTES = 128 << 20  # 2.5 ms of the GPU's copy engine
PIECES_AHEAD = 2
# The longest time that a thread waits for the interpreter while another thread runs. Python's 5 ms
# are three times what a chunk of streamed state (64 MiB) takes to copy.
SWITCH_SECONDS = 0.0005

# --- Rings with the same length in every program (lower/entries.py). Placement has the others.

STAGING = 2  # host staging entries: one moves while the other is used
CHUNK_STAGING = 3  # state chunks in host memory: one arrives, one is updated, one leaves
# A chunk of state that passes through the GPU is this many times smaller than a chunk from NVMe.
# PCIe is as fast with 64 MiB, and a ring of smaller chunks takes less GPU memory.
STREAMED_CHUNKS = 4
# Entries on the GPU for chunks of state that pass through it: one arrives, one is updated, one
# leaves, one absorbs jitter. A matrix product occupies the whole GPU until it ends, whatever the
# priority of the kernels that wait. Chunks that arrive meanwhile need entries of their own, or
# their copies stop.
STREAMING, MOST_STREAMING = 4, 12
# The same of whole layers, which Muon updates at once: one arrives while the other is updated or
# leaves. A third made plans of 8 B on a GPU held to 20 GiB 11% slower, by the room that it takes.
MUON_STREAMING = 2
# FLOPs that a GPU computes while one byte arrives: 700 TFLOP/s beside 50 GB/s (H200). This ratio is
# higher than that of other machines.
OPERATIONS_A_BYTE = 14_000

# --- The GPU's memory beside its buffers.

# Entries begin at multiples of so many bytes: no load of a GPU is wider, and cuBLAS needs no more.
ALIGNMENT = 256
# Bytes of one CUDA graph: 384 graphs of blocks' passes took 72 MB on an H200
# (benchmarks/results/2026-11-24-h200-graphs). Those of updates are not counted: 30 took 4 MB on an
# H100 (2026-11-25-h100-launched), of what torch's allocator has in reserve.
GRAPH_BYTES = 200_000
MOST_GRAPHS = 4096  # of a step: 0.8 GB, and 10 s to capture, as 384 took 0.9 s
# Looked-up rows whose gradients are added at a time: a matrix of ones and zeros, with as many rows
# and columns, says which of them are the same row.
LOOKED_UP_ROWS = 2048
# Elements of 16-bit gradients that an update widens to fp32 at a time. An H200 updated 18, 66 and
# 99 G elements/s with 2^20, 2^22 and 2^24.
WIDENED_ELEMENTS = 2**24
# Elements of experts' matrices that Muon orthogonalises in one batch of products, 134 MB of bf16:
# such products fill a GPU, and what they make and drop stays small.
EXPERTS_AT_ONCE = 2**26


def sums_in_products(gradient_bytes: int) -> bool:
    """Whether matrix products add weights' gradients to sums of `gradient_bytes` an element.

    They do for sums in fp32. A sum in 16 bits adds the gradients that autograd makes. The CPU has
    no product that adds to a sum, so there every gradient is a tensor of its own.
    """
    return gradient_bytes == 4


# Matrices that torch's grouped products take fewer of, and elements of 16 bits in the 16 bytes that
# their loads are aligned to (aten/src/ATen/native/cuda/GroupMM.cu, torch 2.11).
GROUPS, GROUPED_ALIGNED = 1024, 8


def groups_in_one(experts: int, *widths: int) -> bool:
    """Whether a kernel of grouped products takes so many matrices of these sides.

    Otherwise each expert's product is a kernel of its own.
    """
    return experts < GROUPS and all(width % GROUPED_ALIGNED == 0 for width in widths)


# FLOPs of one expert's product (0.4 ms on an H200) from which a kernel of its own is faster. The
# host then waits for the numbers of rows, 50 us for all experts. But such a kernel adds a weight's
# gradient to an fp32 sum itself, and its rate does not fall with rows. The grouped kernel's rate
# falls by a tenth from 2,048 rows an expert to 20,480. Quarters of these rows run at the old rate,
# so it seems to read rows anew for each of its columns
# (benchmarks/results/2026-11-29-h200-wide-experts).
APART_FLOPS = 2**38


def worth_apart(rows: float, out: int, inner: int) -> bool:
    """Whether an expert with so many rows has a product [rows, inner] x [inner, out] of its own."""
    return 2 * rows * out * inner >= APART_FLOPS


def repeats_heads(element_bytes: int, heads: int, kv_heads: int) -> bool:
    """Whether attention repeats keys and values for each query head, and saves the repeated ones.

    It does so in fp32 with grouped heads. CUDA's flash and cuDNN kernels are for half precisions,
    and its fp32 kernel has no grouped heads. Without the repetition, torch would take the unfused
    path, which saves s x s probabilities. The CPU repeats too, so that a plan counts the same bytes
    on every device.
    """
    return element_bytes == 4 and heads != kv_heads


# Columns that attention with linear biases appends to its heads (runtime/attention/alibi.py), where
# it has no kernel of its own. It uses six; with eight, rows of 16-bit numbers stay multiples of 16
# bytes.
ALIBI_COLUMNS = 8
BIASED_COLUMNS = 128  # of the widest heads of its own kernel, whose tiles fill the registers


def biases_in_kernel(element_bytes: int, head_dim: int) -> bool:
    """Whether a kernel adds linear biases to scores (kernels/handwritten/attention.py).

    Its products are those of 16-bit formats.
    """
    return element_bytes == 2 and head_dim <= BIASED_COLUMNS


CAPPED_COLUMNS = 256  # of the widest heads whose scores it caps, with smaller tiles
# Tokens of a chunk of a gated delta rule, as transformers and flash-linear-attention have it: the
# more, the fewer steps from state to state, and the more products within a chunk.
RULE_CHUNK = 64
# The same of a state space. A head has as many scores in a chunk as values at 64 tokens of 64
# columns, and a chunk's states are as large as its values at 128: either way scores or states are
# what most of the memory traffic is of.
SPACE_CHUNK = 64
# Widths of keys and of values that a delta rule's kernels take: whole blocks of 64 columns of
# values, at most two of keys, the second filled up. Those of 16 and 32 came out wrong on an H200
# (torch 2.11, Triton 3.6), cause unknown: products of such sizes alone are right there, and all is
# in Triton's interpreter.
RULE_KEYS, RULE_VALUES = (64, 96, 128), (64, 128, 192, 256)
# Tokens of a program that convolves, and of one that adds up their part of the filters' gradients,
# 4 bytes a tap and channel: with 128 columns 128 KiB, which its taps find in cache again. LFM2's
# gated convolution does both in one program.
FILTERED_TOKENS, SUMMED_TOKENS = 32, 256
MOST_TAPS = 8  # of a convolution's kernels, which have them written out
# Widths of states and of heads that a state space's kernels take: not narrower ones, as above.
SPACE_STATES, SPACE_HEADS = (64, 128, 256), (64, 128)
MOST_OF_STATE = 128 * 128  # elements: a multiprocessor's shared memory holds no larger ones
# Heads of a state space's group that a program of its kernels has at most: they share scores, and
# write one sum of their gradients by keys and queries.
HEADS_TOGETHER = 8
# Rows of a program that norms behind a gate, in the backward. It writes their part of the weight's
# gradient, which is then added up.
GATED_NORM_ROWS = 16
CAPPED_BLOCK = 128  # queries whose capped scores are in memory at a time, where it does not
WIDEST_FLASH = 256  # of the widest heads that FlashAttention-2 takes
# Queries whose scores are in memory at a time, of wider heads, and scores beyond which they are as
# few as products still run well with.
WIDE_QUERIES, WIDE_SCORES = (256, 512), 2**27


def by_products(element_bytes: int, head_dim: int) -> bool:
    """Whether products and kernels between them attend (runtime/attention/by_products.py)."""
    return element_bytes == 2 and head_dim > WIDEST_FLASH


def wide_queries(scores: int) -> int:
    """Queries that they have at a time, where one query of each sequence has so many scores.

    On an H200 512 took 2.3 and 4.6 ms forward and backward with 4,096 tokens of 32 heads, 1,024 as
    long, and 256 a seventh longer. With 16,384 tokens 256 took 2% longer, and 3.9 GiB in place of
    5.8 (benchmarks/results/2026-11-28-h200-wide-heads).
    """
    least, most = WIDE_QUERIES
    return min(most, max(least, WIDE_SCORES // scores))


def caps_in_kernel(element_bytes: int, head_dim: int) -> bool:
    """Whether the same kernel caps scores."""
    return element_bytes == 2 and head_dim <= CAPPED_COLUMNS


def rule_in_kernels(element_bytes: int, widths: tuple[int, int], taps: int) -> bool:
    """Whether generated kernels run a gated delta rule (bigplan/kernels/handwritten/delta_rule.py).

    `widths`: of keys and of values.
    """
    fits = widths[0] in RULE_KEYS and widths[1] in RULE_VALUES
    return element_bytes == 2 and fits and taps <= MOST_TAPS


def space_in_kernels(element_bytes: int, widths: tuple[int, int], taps: int) -> bool:
    """Whether generated kernels run a state space (bigplan/kernels/handwritten/state_space.py).

    `widths`: of states and of heads.
    """
    state, head = widths
    fits = state in SPACE_STATES and head in SPACE_HEADS and state * head <= MOST_OF_STATE
    return element_bytes == 2 and fits and taps <= MOST_TAPS


def space_heads_together(heads: int) -> int:
    """Heads of a program of these kernels, of so many that share a group on a rank."""
    return next(n for n in range(HEADS_TOGETHER, 0, -1) if heads % n == 0)


def convolution_in_kernels(element_bytes: int, taps: int) -> bool:
    """Whether generated kernels run a gated short convolution (handwritten/gated_filters.py).

    They do of whole sequences, and where documents are not kept apart.
    """
    return element_bytes == 2 and taps <= MOST_TAPS


def isolates_in_kernel(element_bytes: int, head_dim: int) -> bool:
    """Whether it also keeps documents apart (runtime/attention/isolated.py)."""
    return caps_in_kernel(element_bytes, head_dim)


# Columns of keys and of values that flash attention takes without padding, where a GPU's does
# (Gpu.narrow_values): DeepSeek-V2's and V3's. Other unlike widths are padded.
NARROW_WIDTHS = (192, 128)

# The least value that a tensor scaled to 8 bits counts as its largest: zeros have a finite factor.
LEAST_LARGEST = 1e-30

# --- The CPU's cores (runtime/cpu/cores.py).

# Part of the cores that AdamW uses while a GPU's copies run. All cores would be no faster, because
# three quarters already use the memory's full rate. But with all cores busy, copies to the host
# wait longer for memory, and lanes wait for a core. With 16, 14 and 12 threads on 16 cores, the GPU
# waited 0.12, 0.08 and 0.06 s a step (benchmarks/LOG.md). `adam_rate_beside_copies` is measured
# with this part of the cores.
CORES_BESIDE_COPIES = Fraction(3, 4)
# How much nicer the threads of runtime/cpu/cores.py are than their process. Threads that queue
# copies and kernels go first. They need a core for microseconds at a time, and while they wait for
# a core, the GPU waits too.
NICE = 10
# Elements that a core updates at a time by torch's kernels, where no kernel could be compiled.
# Small parts wait for the interpreter: on 16 cores of an H200 machine, parts of 2^19, 2^20 and 2^21
# gave 1.8, 2.6 and 2.8 G elements/s (measured as in runtime/cpu/cores.py).
UPDATED_ELEMENTS = 2**21
# Elements that a core adds or squares at a time. Squares are added in fp32, and the parts' sums in
# fp64.
SUMMED_ELEMENTS = 2**22
# Elements of rows' gradients that are added up at a time in host memory. They take 4 MB in fp32,
# which the C library keeps for reuse. It maps 17 MB and more anew every time. Then 4,096 rows of
# 4096 took 96 to 210 ms on two cores, in place of 18 to 21 ms (benchmarks/host_rows.py).
ROW_ELEMENTS = 2**20

# --- Drives and checkpoints (runtime/memory/disk.py, checkpoint/).

# Bytes of a page. O_DIRECT moves whole pages, so entries in host memory begin at a page.
PAGE = 4096
# Bytes of a transfer. At 2 GB/s a transfer takes 4 ms, so a drive's cost per request (about 100 us)
# is small beside it. An extent of 100 MB still keeps all threads busy.
TRANSFER_BYTES = 8 << 20
DISK_THREADS = 4  # transfers of a file at a time; a checkpoint has as many threads of its own
CHECKPOINT_STAGING = DISK_THREADS * TRANSFER_BYTES  # bytes of an entry: a transfer per thread

# --- Data (runtime/data.py).

# Limits of the batches that are read ahead of their turn: bytes of ordinary memory, and their
# number. At least two are read ahead.
READ_AHEAD_BYTES, MOST_READ_AHEAD = 4 << 20, 64
