"""What a layer keeps of a micro-batch between forward and backward, wherever it lives meanwhile.

There are two forms: the layer's input (to be recomputed), or the autograd graph of its forward. The
graph itself holds no memory. It saves parameters as places within the layer's flat buffer; the
backward looks them up again, in whatever slot the layer is by then. It saves activations as
positions in a list, which can be moved to host memory and back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from bigplan.runtime.experts import routed_rows
from bigplan.runtime.experts.mixture import ForgetRouted, Matrix, Routed
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.linear.adapters import adapted_linear
from bigplan.runtime.mixers.ways import Linears, Parameters

ALIGNMENT = 16  # bytes: the widest load of a kernel; only sizes that divide by it are loaded so
SMALL = 1024  # bytes: random-number states and the like stay where they are


Copy = Callable[[Tensor, Tensor], None]  # into the first, of the second: uint8 of equal length


def differentiate(
    outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """torch.autograd.grad, run by the calling thread.

    Autograd's own thread for a device waits for the caller, and the caller waits for it: 0.2 to 0.3
    ms a call, a tenth of a narrow layer's backward (benchmarks/results/2026-11-23-h200-promises).
    """
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(outputs, inputs, grad_outputs=gradients)


def queue_copy(target: Tensor, source: Tensor) -> None:
    """Copy, on CUDA behind what its current stream has to do."""
    target.copy_(source, non_blocking=True)


class _Enter(Function):
    """Identity whose node stands for a layer's input without keeping the input alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        return None, gradients[0]


@dataclass(slots=True)
class _SavedPlace:
    """A saved tensor as bytes at an offset of a buffer."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor within `buffer` (uint8)."""
        typed = buffer[self.offset :]
        whole = typed[: typed.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(slots=True)
class _Moved:
    """A saved tensor that went to host memory with its storage, by the storage's number."""

    storage: int
    place: _SavedPlace


@dataclass(slots=True)
class _RecomputedTensor:
    """A tensor that is computed again from what is kept, once for all who saved it."""

    function: Callable[..., Tensor]
    inputs: list[Any]  # packed
    # While recording: once it is dead its memory is another's. None: nobody saves it.
    output: weakref.ref[Tensor] | None = None
    uses: int = 0
    result: Tensor | None = None


@dataclass(slots=True)
class _View:
    """Someone's view of a tensor that is computed again."""

    of: _RecomputedTensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class KeptActivations:
    """One layer's state for one micro-batch."""

    saved: list[Tensor | _Moved | None] = field(default_factory=list)
    weights: Tensor | None = None  # the layer's flat parameters (uint8), where they are now
    left: list[int] = field(default_factory=list)  # bytes of the storages that were moved
    fetched: list[Tensor] = field(default_factory=list)  # the storages after they came back
    foreign: bool = False  # `fetched` is of another stream's pool
    output: GradientEdge | None = None
    input: GradientEdge | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)  # autograd differentiates by these
    sums: Sums = field(default_factory=Sums)  # products add other parameters' gradients here
    nbytes: int = 0  # on the device, unique storages
    again: dict[int, _RecomputedTensor] = field(default_factory=dict)  # by storage, while recording
    constants: frozenset[int] = frozenset()  # storages not to be moved

    def record(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a layer's forward and keep its graph."""
        anchor = torch.empty(0, requires_grad=True)
        entered = _Enter.apply(anchor, x)  # type: ignore[no-untyped-call]
        self.input = get_gradient_edge(entered)
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
            output = function(entered)
        self.again.clear()
        self.output = get_gradient_edge(output)
        self.nbytes = sum(storage.numel() for storage in self._storages())
        return output.detach()

    def forget(self, output: Tensor, function: Callable[..., Tensor], *inputs: Any) -> None:
        """Do not keep `output` but compute it again, as function(*inputs), when it is asked for."""
        packed = [self._pack(one) for one in inputs]
        self._forget(output, _RecomputedTensor(function, packed))

    def _forget(self, output: Tensor, again: _RecomputedTensor) -> None:
        again.output = weakref.ref(output)
        self.again[_storage_of(output)] = again

    def products_again(self, products: Products) -> Linears:
        """`linears` whose results are also computed again, from an input that is gathered once."""
        ranks = products.ranks

        def run(p: Parameters, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
            outputs = products.ways.linears(p, names, x)
            whole = x if ranks.parts == 1 else _RecomputedTensor(ranks.all_tokens, [self._pack(x)])
            for name, output in zip(names, outputs, strict=True):
                factors = (p[f"{name}.weight"], p.get(f"{name}.bias"))
                again = partial(
                    adapted_linear, products.adapters(p, (name,)), products.matrices_of(name)
                )
                self.forget(output, again, whole, *(t for t in factors if t is not None))
            return outputs

        return run

    def experts_again(self, products: Products) -> ForgetRouted:
        """Forgets gate and up of experts: computed again, from rows that are copied once.

        What other ranks have sent is forgotten too, so that no saved tensor's size depends on it.
        """
        ranks, by, grouped = products.ranks, products.mixture.rows, products.matrices.grouped

        def forget(x: Tensor, matrices: tuple[Matrix | None, Matrix], routed: Routed) -> None:
            (chosen, order), dispatch = routed.places, routed.dispatch
            whole = x if ranks.parts == 1 else _RecomputedTensor(ranks.all_tokens, [self._pack(x)])
            tokens: Any = self._pack(whole)
            if dispatch.away:
                again = _RecomputedTensor(partial(routed_rows.came, dispatch, by), [tokens])
                self._forget(routed.came, again)
                weights = partial(routed_rows.weights, dispatch)
                self.forget(routed.weights, weights, routed.by_token, chosen, order)
                tokens = self._pack(again)
            places = [self._pack(one) for one in (chosen, order)]
            read = partial(routed_rows.read, dispatch, by, grouped)
            rows = _RecomputedTensor(read, [tokens, *places])
            outputs = zip((routed.gate, routed.up), matrices, routed.adapters, strict=True)
            for output, entering, own in outputs:
                if output is None or entering is None:  # of a gate that experts have not
                    continue
                matrix, *biases = entering
                given = partial(routed_rows.given, dispatch, grouped, own)
                self.forget(output, given, rows, matrix, chosen, order, *biases)

        return forget

    def keep_input(self, x: Tensor) -> None:
        """Keep only the layer's input."""
        self.saved = [x]
        self.nbytes = x.numel() * x.element_size()

    def kept_input(self) -> Tensor:
        """The input, fetched back if it was moved."""
        return self._saved(0)

    def gradients(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients by the input and by `parameters`; `sums` must be open."""
        assert self.output is not None and self.input is not None
        self._use_on_current_stream()
        inputs: list[Any] = [self.input, *self.parameters.values()]  # torch's stubs forbid this
        by_input, *others = differentiate([self.output], inputs, [gradient])
        return by_input, dict(zip(self.parameters, others, strict=True))

    def _pack(self, tensor: Tensor | _RecomputedTensor) -> Any:
        assert self.weights is not None
        if isinstance(tensor, _RecomputedTensor):
            tensor.uses += 1
            return tensor
        start, nbytes = self.weights.data_ptr(), self.weights.numel()
        if start <= tensor.data_ptr() < start + nbytes and tensor.numel():
            return _SavedPlace(
                tensor.data_ptr() - start, tensor.shape, tensor.stride(), tensor.dtype
            )
        if tensor.untyped_storage().data_ptr() in self.constants:
            return tensor
        again = self.again.get(_storage_of(tensor))
        if again is not None and again.output is not None and again.output() is not None:
            again.uses += 1
            return _View(again, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        self.saved.append(tensor.detach())
        return len(self.saved) - 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedPlace):
            assert self.weights is not None
            return packed.view(self.weights)
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _RecomputedTensor):
            return self._computed(packed)
        if isinstance(packed, _View):
            whole = self._computed(packed.of)
            return whole.as_strided(packed.shape, packed.stride, packed.offset)
        tensor = self._saved(packed)
        # Autograd asks once; letting go here frees activations while the backward goes on.
        self.saved[packed] = None
        return tensor

    def _computed(self, again: _RecomputedTensor) -> Tensor:
        """The result, kept until the last who saved it has asked."""
        if again.result is None:
            with torch.no_grad():
                again.result = again.function(*(self._unpack(packed) for packed in again.inputs))
        result = again.result
        again.uses -= 1
        if again.uses == 0:
            again.result = None
        return result

    def _saved(self, index: int) -> Tensor:
        tensor = self.saved[index]
        if isinstance(tensor, Tensor):
            return tensor
        assert tensor is not None, "an activation is used twice"
        assert self.fetched, "activations are read before they are fetched"
        return tensor.place.view(self.fetched[tensor.storage])

    def _storages(self) -> Iterator[Tensor]:
        """Each storage of the saved tensors once, as bytes."""
        seen = set[int]()
        for tensor in self.saved:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes() >= SMALL:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def move_out(self, target: Tensor, copy: Copy = queue_copy) -> list[Tensor]:
        """`copy` the activations to `target` (uint8, host); the storages that they leave, as bytes.

        Whoever holds the storages must not give them back before the copies have ended. The plan
        reserves their bytes and no more: most aligned first, every storage starts at a multiple of
        its own alignment without padding.
        """
        storages, end = self._leave(), 0
        for storage in storages:
            assert end + storage.numel() <= target.numel(), (
                f"activations need more than the {target.numel()} bytes that the plan reserved"
            )
            copy(target[end : end + storage.numel()], storage)
            end += storage.numel()
        return storages

    def stay(self) -> None:
        """Have the activations in their storages as if they had left and come back."""
        self.fetched = self._leave()

    def _leave(self) -> list[Tensor]:
        """Know the activations by their places in storages alone; these, as bytes."""
        storages = sorted(self._storages(), key=_alignment, reverse=True)
        self.left = [storage.numel() for storage in storages]
        numbers = {storage.data_ptr(): i for i, storage in enumerate(storages)}
        for i, tensor in enumerate(self.saved):
            if isinstance(tensor, Tensor):
                number = numbers.get(tensor.untyped_storage().data_ptr())
                if number is not None:
                    start = int(tensor.storage_offset()) * tensor.element_size()
                    place = _SavedPlace(start, tensor.shape, tensor.stride(), tensor.dtype)
                    self.saved[i] = _Moved(number, place)
        return storages

    def fetch(self, source: Tensor, storages: list[Tensor], device: torch.device) -> None:
        """Copy the activations back from `source` (uint8, host), into `storages` where they fit.

        They fit if a layer of the same kind and policy has left them. Then nothing is allocated:
        memory of another stream's pool would fragment that of the compute stream.
        """
        if [storage.numel() for storage in storages] != self.left:
            storages = [torch.empty(n, dtype=torch.uint8, device=device) for n in self.left]
            self.foreign = device.type == "cuda"
        start = 0
        for storage in storages:
            queue_copy(storage, source[start : start + storage.numel()])
            start += storage.numel()
        self.fetched = storages

    def _use_on_current_stream(self) -> None:
        if self.foreign:
            for storage in self.fetched:
                storage.record_stream(torch.cuda.current_stream())

    def fetched_input(self) -> Tensor:
        """The kept input on the compute stream."""
        self._use_on_current_stream()
        return self.kept_input()


def _storage_of(tensor: Tensor) -> int:
    """What tells storages apart, those without memory too, which experts without a row leave."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _alignment(storage: Tensor) -> int:
    """The largest power of two, at most ALIGNMENT, that divides the storage's bytes."""
    return min(ALIGNMENT, storage.numel() & -storage.numel())
