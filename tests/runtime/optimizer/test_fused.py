"""Optimizers: torch's arithmetic, and the same bits however parameters are cut into pieces.

Each test runs with the compiled kernels (bigplan/runtime/cpu/step.cpp) and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.spec.optimizer import Optimizer
from tests.examples import examples

pytest.importorskip("torch")

import torch

from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import Piece, native
from bigplan.runtime.optimizer import fused
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.fused import Kernel, fused_step
from bigplan.runtime.optimizer.sgd import sgd_kernel

RATE, DECAY, STEP = 1e-2, 0.1, 7
AT_ONCE = 1024  # elements: any piece here is several parts
OPTIMIZERS = {
    "adamw": Optimizer(),
    "momentum": Optimizer(name="sgd"),
    "plain": Optimizer(name="sgd", momentum=0.0),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "UPDATED_ELEMENTS", AT_ONCE)
    monkeypatch.setattr(fused, "WIDENED_ELEMENTS", AT_ONCE)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(fused, "native", lambda: None)
    elif native() is None:
        pytest.skip("needs a C++ compiler")


def _kernel(name: str, step: int = STEP, decay: float = DECAY) -> Kernel:
    settings = OPTIMIZERS[name]
    if settings.name == "sgd":
        return sgd_kernel(settings, RATE, decay)
    return adamw_kernel(settings, step, RATE, decay)


def _piece(name: str, count: int, seed: int, device: str = "cpu") -> Piece:
    generator = torch.Generator().manual_seed(seed)
    parameter, gradient, average = torch.randn(3, count, generator=generator)
    square = torch.rand(count, generator=generator)
    state = (average * 1e-3, square * 1e-4)[: OPTIMIZERS[name].kept]
    return _map(Piece(parameter, gradient * 1e-2, state), lambda tensor: tensor.to(device))


def _map(piece: Piece, change: Callable[[torch.Tensor], torch.Tensor]) -> Piece:
    return Piece(change(piece.parameter), change(piece.gradient), tuple(map(change, piece.state)))


def _stepped(
    name: str,
    piece: Piece,
    cuts: Iterable[int] = (),
    divisor: float = 1.0,
    gradient_dtype: torch.dtype = torch.float32,
) -> Piece:
    """The piece after a step on its parts between `cuts`."""
    new = _map(piece, torch.clone)
    new = new._replace(gradient=new.gradient.to(gradient_dtype))
    edges = [0, *sorted(cuts), new.elements]
    fused_step([new.part(a, b) for a, b in pairwise(edges)], _kernel(name), divisor)
    return new


def _assert_same_bits(a: Piece, b: Piece) -> None:
    assert torch.equal(a.parameter, b.parameter)
    assert len(a.state) == len(b.state)
    assert all(torch.equal(one, two) for one, two in zip(a.state, b.state, strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    count=st.integers(1, 3000),
    data=st.data(),
    divisor=st.sampled_from((1.0, 2.7, 65536.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
def test_pieces_change_no_bit(
    name: str, count: int, data: st.DataObject, divisor: float, dtype: torch.dtype
) -> None:
    piece = _piece(name, count, count)
    cuts = data.draw(st.lists(st.integers(0, count), max_size=12))
    whole = _stepped(name, piece, (), divisor, dtype)
    _assert_same_bits(whole, _stepped(name, piece, cuts, divisor, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("divisor", [1.0, 2.7])
def test_pieces_change_no_bit_on_a_gpu(name: str, divisor: float) -> None:
    piece = _piece(name, 70_003, 8, "cuda")
    whole = _stepped(name, piece, (), divisor)
    _assert_same_bits(whole, _stepped(name, piece, range(0, 70_001, 777), divisor))
    _assert_same_bits(whole, _stepped(name, piece, (5, 64_013), divisor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_threads_change_no_bit(name: str) -> None:
    piece = _piece(name, 300_000 + 7, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(_stepped(name, piece))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        _assert_same_bits(results[0], other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_vectors_equal_torchs_optimizer_bit_by_bit(name: str, device: str) -> None:
    """From its first step: moments that start as zeros are those that torch makes."""
    piece, rule = _piece(name, 96 * fused.VECTOR, 2, device), OPTIMIZERS[name]
    reference = torch.nn.Parameter(piece.parameter.clone())
    optimizer: torch.optim.Optimizer
    if rule.name == "sgd":
        optimizer = torch.optim.SGD(
            [reference], lr=RATE, momentum=rule.momentum, weight_decay=DECAY, fused=True
        )
    else:
        betas = (rule.beta1, rule.beta2)
        optimizer = torch.optim.AdamW(
            [reference], lr=RATE, betas=betas, eps=rule.epsilon, weight_decay=DECAY, fused=True
        )
    ours = piece._replace(state=tuple(map(torch.zeros_like, piece.state)))
    divisor = torch.tensor(2.7, device=device)
    for step in (1, 2, 3):
        gradient = piece.gradient * step
        reference.grad = gradient / divisor
        optimizer.step()
        fused_step([ours._replace(gradient=gradient)], _kernel(name, step), 2.7)
        assert torch.equal(ours.parameter, reference.detach())
        kept = [v for k, v in optimizer.state[reference].items() if k != "step" and v is not None]
        assert len(kept) == len(ours.state)
        assert all(map(torch.equal, kept, ours.state))


def _formula(name: str, piece: Piece, divisor: float) -> Piece:
    """The textbook update in fp64."""
    rule = OPTIMIZERS[name]
    p, g, *state = (t.double() for t in (piece.parameter, piece.gradient, *piece.state))
    g = g / divisor
    if rule.name == "sgd":
        g = g + DECAY * p
        if state:
            g = state[0] = rule.momentum * state[0] + g
        return Piece(p - RATE * g, g, tuple(state))
    m = rule.beta1 * state[0] + (1 - rule.beta1) * g
    v = rule.beta2 * state[1] + (1 - rule.beta2) * g * g
    root = (v / (1 - rule.beta2**STEP)).sqrt() + rule.epsilon
    new = p * (1 - RATE * DECAY) - RATE * (m / (1 - rule.beta1**STEP)) / root
    return Piece(new, g, (m, v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 3001])
def test_every_length_follows_the_formula(name: str, device: str, count: int) -> None:
    """Nothing is left out at the end of a tensor."""
    piece = _piece(name, count, 4, device)
    new, expected = _stepped(name, piece, divisor=2.0), _formula(name, piece, 2.0)
    # A few fp32 roundings (6e-8 each) of values below 10.
    torch.testing.assert_close(new.parameter.double(), expected.parameter, rtol=1e-6, atol=1e-6)
    for ours, exact in zip(new.state, expected.state, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [1.0, 2.7])
def test_16_bit_gradients_are_their_fp32_values(
    name: str, dtype: torch.dtype, divisor: float, device: str
) -> None:
    piece = _piece(name, 5003, 5, device)
    narrow = _stepped(name, piece, (100, 117, 2500), divisor, dtype)
    wide = _stepped(
        name, piece._replace(gradient=piece.gradient.to(dtype).float()), divisor=divisor
    )
    _assert_same_bits(narrow, wide)


def test_pieces_are_rows_in_one_line_and_may_be_none() -> None:
    fused_step([], _kernel("adamw"))
    shaped = _map(_piece("adamw", 60, 6), lambda tensor: tensor.view(5, 12))
    with pytest.raises(AssertionError):
        fused_step([shaped], _kernel("adamw"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cores_give_the_same_bits_and_the_cast_copy(dtype: torch.dtype) -> None:
    """More elements than one core takes at once, in pieces that end anywhere."""
    count = AT_ONCE + 12_345
    piece = _piece("adamw", count, 3)
    plain = _stepped("adamw", piece, divisor=3.0, gradient_dtype=dtype)
    new = _map(piece, torch.clone)
    copy = torch.empty(count, dtype=torch.bfloat16)
    new = new._replace(gradient=new.gradient.to(dtype), copy=copy)
    edges = [0, 100, 7_777, count]
    with Cores() as cores:
        parts = [new.part(a, b) for a, b in pairwise(edges)]
        fused_step(parts, _kernel("adamw"), 3.0, cores)
    _assert_same_bits(new, plain)
    assert torch.equal(copy, plain.parameter.bfloat16())


def test_adamws_weight_decay_is_decoupled_and_can_be_off() -> None:
    piece = _map(_piece("adamw", 32, 7), torch.zeros_like)
    piece = piece._replace(parameter=torch.arange(32.0))
    decayed = _stepped("adamw", piece).parameter
    assert torch.equal(decayed, piece.parameter * (1 - RATE * DECAY))
    new = _map(piece, torch.clone)
    fused_step([new], _kernel("adamw", decay=0.0))
    assert torch.equal(new.parameter, piece.parameter)


def test_tensors_of_different_lengths_are_our_own_error() -> None:
    piece = _piece("adamw", 16, 9)
    with pytest.raises(AssertionError):
        fused_step([piece._replace(gradient=torch.zeros(17))], _kernel("adamw"))
    with pytest.raises(AssertionError):
        fused_step([piece._replace(copy=torch.zeros(15).bfloat16())], _kernel("adamw"))
    with pytest.raises(AssertionError):
        _kernel("adamw", step=0)
