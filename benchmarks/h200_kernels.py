"""Fused kernels beside plain torch, attention backends, products and memory set-up, on one GPU.

Usage: h200_kernels.py. Milliseconds are medians of CUDA-event timings; the byte limit is the bytes
that must move at the rate of a device copy measured in the same run.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bigplan.kernels import rms_norm, rotary, swiglu
from bigplan.runtime import blocks, operators
from bigplan.runtime.first_values import random_values, whole_values
from bigplan.runtime.products import add_product
from bigplan.spec.catalog import find_model

TOKENS, HIDDEN, FFN = 32768, 4096, 14336
# Outputs and inputs of a product: attention's, the MLP's, and those that share an input together.
PRODUCTS = (
    (4096, 4096),
    (1024, 4096),
    (6144, 4096),
    (14336, 4096),
    (28672, 4096),
    (4096, 14336),
)
# Of the weights of Llama 3 8B: down_proj, gate_proj and up_proj, qkv together, o_proj.
WEIGHTS = ((4096, 14336), (14336, 4096), (6144, 4096), (4096, 4096))
LOCKED, COPIED = 12 << 30, 4 << 30  # bytes page-locked, and of them copied to


def timed(work: Callable[[], object]) -> float:
    """Median milliseconds."""
    return float(triton.testing.do_bench(work, warmup=50, rep=150, return_mode="median"))


def random(*shape: int) -> Tensor:
    """Normal bf16 values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def copy_rate() -> float:
    """Bytes per second of a device copy, reads and writes."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    a.random_(0, 255)
    rate = 2 * a.numel() / (timed(lambda: b.copy_(a)) / 1e3)
    print(f"device copy {rate / 1e12:.3f} TB/s")
    return rate


def error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((ours.float() - reference.float()).norm() / reference.float().norm())


def row(
    name: str, limit: float, work: Callable[[], object], plain: Callable[[], object] | None
) -> None:
    """A kernel beside plain torch (None: nothing, which takes 0.001 ms) and its limit in ms."""
    ours, theirs = timed(work), timed(plain or (lambda: None))
    print(
        f"{name:24s} {ours:8.3f} ms  plain {theirs:8.3f}  limit {limit:7.3f}  {limit / ours:5.1%}"
    )


def fused_swiglu(rate: float) -> None:
    """SwiGLU: two tensors read and one written, five in all backward; `rate` in bytes/s.

    With the output again it is six, beside a forward and a backward.
    """
    g, u, d = random(TOKENS, FFN), random(TOKENS, FFN), random(TOKENS, FFN)
    each = g.numel() * 2 / rate * 1e3
    print("swiglu error", error(swiglu.forward(g, u), swiglu.reference(g.double(), u.double())))
    row("swiglu forward", 3 * each, lambda: swiglu.forward(g, u), lambda: F.silu(g).mul_(u))

    def plain() -> object:
        return torch.ops.aten.silu_backward(d * u, g), F.silu(g).mul_(d)

    row("swiglu backward", 5 * each, lambda: swiglu.backward(g, u, d), plain)

    def apart() -> object:
        return swiglu.forward(g, u), swiglu.backward(g, u, d)

    row("  and output; apart", 6 * each, lambda: swiglu.backward(g, u, d, d), apart)


def fused_rms_norm(rate: float, width: int) -> None:
    """RMSNorm of rows of `width`: one tensor read and one written, three in all backward.

    With another gradient by its input it is four, beside a backward and an addition.
    """
    rows = TOKENS * HIDDEN // width
    x, d, w = random(rows, width), random(rows, width), random(width)
    each = x.numel() * 2 / rate * 1e3
    out, rstd = rms_norm.forward(x, w, 1e-5)
    print("rms error", error(out, rms_norm.reference(x.double(), w.double(), 1e-5)))
    xr, wr = x.double().requires_grad_(), w.double().requires_grad_()
    by = torch.autograd.grad(rms_norm.reference(xr[:4096], wr, 1e-5), [xr, wr], d[:4096].double())
    ours = rms_norm.backward(x[:4096].contiguous(), w, rstd[:4096], d[:4096])
    print("rms backward errors", error(ours[0], by[0][:4096]), error(ours[1], by[1]))
    row(
        f"rmsnorm {width} forward",
        2 * each,
        lambda: rms_norm.forward(x, w, 1e-5),
        lambda: rms_norm.reference(x, w, 1e-5),
    )
    row(f"rmsnorm {width} backward", 3 * each, lambda: rms_norm.backward(x, w, rstd, d), None)
    row(
        "  and added; apart",
        4 * each,
        lambda: rms_norm.backward(x, w, rstd, d, out),
        lambda: rms_norm.backward(x, w, rstd, d)[0] + out,
    )


def fused_rotary(rate: float) -> None:
    """Rotation of queries: read and written once."""
    model = find_model("llama-like-3.3b")
    cos, sin = blocks.rope_table(model, 4096, "cuda", torch.bfloat16)
    q = random(8, 4096, 32, 128)
    reference = rotary.reference(q.double(), cos.double(), sin.double())
    print("rotary error", error(rotary.rotate(q, cos, sin), reference))
    limit = 2 * q.numel() * 2 / rate * 1e3
    row(
        "rotary",
        limit,
        lambda: rotary.rotate(q, cos, sin),
        lambda: operators.rotate(q, cos, sin),
    )


def attention(batch: int, length: int, backend: SDPBackend | None) -> None:
    """Causal attention, 32 heads of 128 and 8 of keys; None is torch's own choice of backend."""
    q = random(batch, length, 32, 128).transpose(1, 2).requires_grad_()
    k, v = (random(batch, length, 8, 128).transpose(1, 2).requires_grad_() for _ in "kv")
    flops = 4 * batch * 32 * length * length * 128 / 2

    def forward() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        out = forward()
        d = torch.randn_like(out)
        there = timed(forward)
        back = timed(lambda: torch.autograd.grad(out, [q, k, v], d, retain_graph=True))
    except RuntimeError as refused:
        print(backend, str(refused)[:200])
        return
    print(
        f"attention b{batch} s{length} {backend}: fwd {there:.3f} ms {flops / there / 1e9:.0f} TF, "
        f"bwd {back:.3f} ms {2.5 * flops / back / 1e9:.0f} TF; strides {out.stride()}"
    )


def product(n: int, k: int) -> None:
    """x w^T and its two gradients."""
    m = TOKENS
    x, w, d = random(m, k), random(n, k), random(m, n)
    flops = 2 * m * n * k
    fwd, dx, dw = (
        flops / timed(work) / 1e9 for work in (lambda: x @ w.T, lambda: d @ w, lambda: d.T @ x)
    )
    print(f"product m{m} n{n} k{k}: fwd {fwd:.0f} TF dx {dx:.0f} dw {dw:.0f}")


def weight_gradient(m: int, n: int, k: int) -> None:
    """A weight's gradient to its fp32 sum, by a product of its own in bf16 and inside the product.

    Both to a sum that holds something and to a fresh one; m tokens, n outputs, k inputs.
    """
    x, d, total = random(m, k), random(m, n), torch.zeros(n, k, device="cuda")
    flops = 2 * m * n * k
    ways: dict[str, Callable[[], object]] = {
        "apart": lambda: total.add_(d.T @ x),
        "inside": lambda: add_product(total, d, x, fresh=False),
        "apart, fresh": lambda: total.copy_(d.T @ x),
        "inside, fresh": lambda: add_product(total, d, x, fresh=True),
    }
    times = {name: timed(way) for name, way in ways.items()}
    shown = (f"{name} {ms:.3f} ms {flops / ms / 1e9:.0f} TF" for name, ms in times.items())
    print(f"dw m{m} n{n} k{k}: " + "; ".join(shown))


def sustained() -> None:
    """1800 times one product, about ten seconds: the clock falls under load."""
    a, b = random(TOKENS, 4096), random(14336, 4096)
    for part in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(300):
            a @ b.T
        end.record()
        torch.cuda.synchronize()
        rate = 300 * 2 * TOKENS * 4096 * 14336 / start.elapsed_time(end) / 1e9
        print(f"sustained {part}: {rate:.0f} TF")


def block(name: str) -> None:
    """A block of llama-like-3.3b, 8 sequences of 4096."""
    model = find_model("llama-like-3.3b")
    rope = blocks.rope_table(model, 4096, "cuda", torch.bfloat16)
    first = partial(random_values, seed=0)
    p = {
        q.name: whole_values(first, "block", 1, q).cuda().bfloat16().requires_grad_()
        for q in model.kinds()["block"]
    }
    x = random(8, 4096, 4096).requires_grad_()
    there = timed(lambda: blocks.block(p, x, model, rope))
    out = blocks.block(p, x, model, rope)
    d = torch.randn_like(out)
    back = timed(lambda: torch.autograd.grad(out, [x, *p.values()], d, retain_graph=True))
    print(f"block {name}: forward {there:.2f} backward {back:.2f}")


def page_locking(huge: bool, threads: int) -> None:
    """Seconds to touch (with one thread: not at all), page-lock, copy to and release 12 GiB."""
    cudart = torch.cuda.cudart()
    mapping = mmap.mmap(-1, LOCKED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(mapping, dtype=torch.uint8)
    began = time.perf_counter()
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda c: c.view(-1, 4096)[:, 0].fill_(0), pages.chunk(threads * 8)))
    touched = time.perf_counter()
    status = int(cudart.cudaHostRegister(pages.data_ptr(), LOCKED, 0))
    registered = time.perf_counter()
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copying = time.perf_counter()
    pages[:COPIED].copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    copied = time.perf_counter()
    cudart.cudaHostUnregister(pages.data_ptr())
    released = time.perf_counter()
    print(
        f"12 GiB huge {huge} touch threads {threads}: touch {touched - began:.2f} s, "
        f"register {registered - touched:.2f} s ({status}), "
        f"copy {COPIED / (copied - copying) / 1e9:.1f} GB/s, unregister {released - copied:.2f}"
    )


def main() -> None:
    """Measure everything."""
    rate = copy_rate()
    fused_swiglu(rate)
    for width in (HIDDEN, 128):
        fused_rms_norm(rate, width)
    fused_rotary(rate)
    for batch, length in ((8, 4096), (2, 4096), (1, 32768)):
        for backend in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            attention(batch, length, backend)
    for n, k in PRODUCTS:
        product(n, k)
    for tokens in (8192, TOKENS):
        for n, k in WEIGHTS:
            weight_gradient(tokens, n, k)
    sustained()
    block("fused")
    with patch.object(operators, "kernels_for", lambda x: False):
        block("plain")
    for huge in (False, True, True):
        for threads in (1, 16):
            page_locking(huge, threads)
    print(
        Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
        Path("/proc/meminfo").read_text()[:300],
    )


if __name__ == "__main__":
    main()
