"""AdamW: torch's arithmetic, and the same bits however parameters are cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.spec.training import Optimizer

pytest.importorskip("torch")

import torch

from bigplan.runtime import adamw
from bigplan.runtime.adamw import adamw_step

SETTINGS = Optimizer(learning_rate=1e-2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
State = dict[str, torch.Tensor]
NAMES = ("parameter", "gradient", "exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CPU_CHUNK", 1024)
    monkeypatch.setattr(adamw, "CUDA_CHUNK", 1024)


def _state(count: int, seed: int, device: str = "cpu") -> State:
    generator = torch.Generator().manual_seed(seed)
    parameter, gradient, average = torch.randn(3, count, generator=generator)
    square = torch.rand(count, generator=generator)
    values = (parameter, gradient * 1e-2, average * 1e-3, square * 1e-4)
    return {name: value.to(device) for name, value in zip(NAMES, values, strict=True)}


def _step(new: State, step: int, settings: Optimizer = SETTINGS, scale: float = 1.0) -> None:
    p, g, m, v = ([new[name]] for name in NAMES)
    adamw_step(p, g, m, v, step, settings, scale)


def _stepped(
    state: State,
    cuts: Iterable[int] = (),
    scale: float = 1.0,
    step: int = 7,
    gradient_dtype: torch.dtype = torch.float32,
) -> State:
    """The state after a step on the pieces between `cuts`; the gradient must stay as it was."""
    new = {name: value.clone() for name, value in state.items()}
    new["gradient"] = new["gradient"].to(gradient_dtype)
    kept = new["gradient"].clone()
    edges = [0, *sorted(cuts), len(new["parameter"])]
    lists = ([value[a:b] for a, b in pairwise(edges)] for value in new.values())
    p, g, m, v = lists
    adamw_step(p, g, m, v, step, SETTINGS, scale)
    assert torch.equal(kept, new["gradient"])
    return new


def _assert_same_bits(a: State, b: State) -> None:
    for name in NAMES:
        assert torch.equal(a[name], b[name]), name


@settings(max_examples=60)
@given(
    count=st.integers(0, 5000),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    scale=st.sampled_from([1.0, 0.37]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_pieces_change_no_bit(
    count: int, cuts: list[int], scale: float, dtype: torch.dtype, seed: int
) -> None:
    state = _state(count, seed)
    whole = _stepped(state, (), scale, gradient_dtype=dtype)
    cuts = [min(cut, count) for cut in cuts]
    _assert_same_bits(whole, _stepped(state, cuts, scale, gradient_dtype=dtype))


@pytest.mark.gpu
def test_pieces_change_no_bit_on_cuda() -> None:
    state = _state(70_001, 3, "cuda")
    for scale in (1.0, 0.37):
        whole = _stepped(state, (), scale)
        _assert_same_bits(whole, _stepped(state, range(0, 70_001, 777), scale))
        _assert_same_bits(whole, _stepped(state, (5, 64_013), scale))


def test_threads_change_no_bit() -> None:
    state = _state(300_000 + 7, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(_stepped(state))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        _assert_same_bits(results[0], other)


@pytest.mark.parametrize("device", DEVICES)
def test_whole_vectors_equal_torchs_optimizer_bit_by_bit(device: str) -> None:
    state = _state(96 * adamw.VECTOR, 2, device)
    reference = torch.nn.Parameter(state["parameter"].clone())
    optimizer = torch.optim.AdamW(
        [reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    ours = {name: value.clone() for name, value in state.items()}
    ours["exp_avg"].zero_()
    ours["exp_avg_sq"].zero_()
    for step in (1, 2, 3):
        gradient = state["gradient"] * step
        factor = 0.37
        reference.grad = gradient.clone().mul_(factor)  # as clip_grad_norm_ does
        optimizer.step()
        ours["gradient"].copy_(gradient)
        _step(ours, step, scale=factor)
        assert torch.equal(ours["parameter"], reference.detach())
        moments = optimizer.state[reference]
        assert torch.equal(ours["exp_avg"], moments["exp_avg"])
        assert torch.equal(ours["exp_avg_sq"], moments["exp_avg_sq"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 3001])
def test_every_length_follows_the_formula(device: str, count: int) -> None:
    """The textbook update in fp64: nothing is left out at the end of a tensor."""
    state = _state(count, 4, device)
    new, step = _stepped(state, step=5, scale=0.5), 5
    p, g, m, v = (value.double() for value in state.values())
    g = g * 0.5
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    expected = p * (1 - 1e-2 * 0.1) - 1e-2 * update
    # A few fp32 roundings (6e-8 each) of values below 10.
    torch.testing.assert_close(new["parameter"].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new["exp_avg"].double(), m, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(new["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_bf16_gradients_are_their_fp32_values(device: str, scale: float) -> None:
    state = _state(5003, 5, device)
    narrow = _stepped(state, scale=scale, gradient_dtype=torch.bfloat16)
    state["gradient"] = state["gradient"].bfloat16().float()
    wide = _stepped(state, scale=scale)
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        assert torch.equal(narrow[name], wide[name])


def test_rows_of_any_shape_and_no_tensors() -> None:
    state = _state(60, 6)
    flat = _stepped(state)
    shaped = {name: value.clone().view(5, 12) for name, value in state.items()}
    _step(shaped, 7)
    assert torch.equal(shaped["parameter"].flatten(), flat["parameter"])
    adamw_step([], [], [], [], 1, SETTINGS)


def test_weight_decay_is_decoupled_and_can_be_off() -> None:
    state = _state(32, 7)
    state["gradient"].zero_()
    state["exp_avg"].zero_()
    assert torch.equal(_stepped(state)["parameter"], state["parameter"] * (1 - 1e-2 * 0.1))
    new = {name: value.clone() for name, value in state.items()}
    bare = SETTINGS.model_copy(update={"weight_decay": 0.0})
    _step(new, 7, bare)
    assert torch.equal(new["parameter"], state["parameter"])


def test_lists_of_different_lengths_are_our_own_error() -> None:
    value = torch.zeros(16)
    with pytest.raises(ValueError, match="zip"):
        adamw_step([value], [value], [value], [], 1, SETTINGS)
    with pytest.raises(AssertionError):
        adamw_step([value], [value], [value], [value], 0, SETTINGS)
