"""`optimise`: a module or function whose operators run as the kernels that the model chooses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from bigplan.errors import InputError
from bigplan.kernels.capture import MakeKernel, captured, halves
from bigplan.kernels.chunked_loss import in_chunks
from bigplan.kernels.decomposed import DECOMPOSED
from bigplan.kernels.fusion.cover import CoverUnit
from bigplan.kernels.fusion.keep import KeepPlan, best_plan
from bigplan.kernels.here import gpu_here, pricer_for, runs_kernels
from bigplan.kernels.images import read_as_turned
from bigplan.kernels.rewritten import rewritten
from bigplan.kernels.tuned import PickFile, Tuner, default_file

Example = Tensor | tuple[Sequence[int], torch.dtype]


class Optimiser:
    """Compiles a function for each kind of inputs, and keeps what was decided."""

    def __init__(
        self, gpu: str | None, price: float, tune: int = 0, memory: int | None = None
    ) -> None:
        self.gpu = gpu or gpu_here()
        self.pricer = pricer_for(self.gpu)
        self.price, self.memory = price, memory
        store, multiprocessors = PickFile(default_file()), self.pricer.gpu.multiprocessors
        self.tuner = Tuner(tune, self.gpu, multiprocessors, store) if tune else None
        self.plans: list[KeepPlan] = []
        self.kernels: list[Any] = []
        self.only_plans = False

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for inputs like those that it is first called with."""
        from torch._functorch.aot_autograd import aot_function  # 1.5 s of a core

        compilers: dict[str, Any] = {
            "fw_compiler": self._finished,
            "bw_compiler": self._finished,
            "inference_compiler": self._inference,
            "partition_fn": self._partition,
        }
        return aot_function(function, decompositions=DECOMPOSED, **compilers)

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        read_as_turned(joint.graph)
        joint.graph.eliminate_dead_code()
        source = captured(joint, num_fwd_outputs)
        plan = best_plan(source.graph, self.pricer, self.price)
        self.plans.append(plan)
        return halves(plan, source, num_fwd_outputs, self._maker(_devices(joint)))

    def _inference(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        returned = next(n for n in module.graph.nodes if n.op == "output").args[0]
        ahead, _ = self._partition(module, inputs, num_fwd_outputs=len(returned))
        return self._finished(ahead, inputs)

    def _finished(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        del inputs
        run = _of_metadata(module) if self.only_plans else module.forward

        def boxed(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()  # what is passed so can be freed while it runs
            return run(*given)

        vars(boxed)["_boxed_call"] = True  # AOTAutograd asks for it
        return boxed

    def _maker(self, devices: set[str]) -> MakeKernel | None:
        return self._kernel if not self.only_plans and runs_kernels(devices) else None

    def _kernel(self, unit: CoverUnit) -> Callable[..., tuple[Tensor, ...]]:
        from bigplan.kernels.launch import LaunchedKernel

        assert unit.fused is not None
        pick_tile = self.tuner.tune if self.tuner is not None else None
        kernel = LaunchedKernel(unit.fused.body, unit.fused.choices, pick_tile)
        self.kernels.append(kernel)

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return kernel(*inputs)

        run.__name__ = run.__qualname__ = f"kernel_{len(self.kernels)}"
        run.__module__ = "bigplan.kernels.generated"
        return run


def optimise(
    target: nn.Module | Callable[..., Any],
    examples: Sequence[Example] = (),
    *,
    gpu: str | None = None,
    price: float = 0.0,
    tune: int = 0,
    memory: int | None = None,
) -> Any:
    """A module (or function) that computes the same with fused kernels.

    For a module the result is a module of the same class that shares its parameters, buffers and
    submodules, so autograd, state_dict and optimizers see the same objects. New shapes are planned
    at their first call. `examples`, tensors or (shape, dtype) pairs, are planned now, without
    running anything; the first pair wants a gradient. `gpu` is a shipped GPU type, by default the
    one of this machine, or an H200 if there is none. `price` is the cost of keeping a byte for the
    backward, in seconds. `tune`: on a GPU, time this many of the model's best tiles when a kernel
    first runs, and keep the fastest in a file (see `tuned.py`). `memory`: bytes that the logits of
    a linear and `F.cross_entropy` may take. Both then run in chunks of tokens (`chunked_loss.py`),
    with 0 for the mean of no target, where torch has nan. Logits that something else reads are
    computed once more. Raises InputError.
    """
    optimiser = Optimiser(gpu, price, tune if torch.cuda.is_available() else 0, memory)
    module = target if isinstance(target, nn.Module) else None
    runner = _Runner(target, optimiser)
    if examples:
        runner.plan(examples)
    if module is None:
        return runner
    result = copy.copy(module)  # parameters, buffers and submodules stay the same objects
    runner.owner = result
    result.forward = runner.__call__
    vars(result)["kernels"] = optimiser
    return result


class _Runner:
    """Calls what was compiled for inputs of the same kind."""

    def __init__(self, target: nn.Module | Callable[..., Any], optimiser: Optimiser) -> None:
        self.target, self.optimiser = target, optimiser
        self.owner: nn.Module | None = None
        self.known: dict[Any, Callable[..., Any]] = {}

    @property
    def kernels(self) -> Optimiser:
        """What was decided, as a module's `kernels`."""
        return self.optimiser

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state()
        key = self._key(state, args, kwargs)
        if key not in self.known:
            return self._first(key, (state, *args), kwargs)
        return self.known[key](state, *args, **kwargs)

    def _first(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The call that compiles. Backwards keep what they read, so that one may run twice."""
        compiled = self.optimiser.compiled(self._function())
        try:
            with torch._functorch.config.patch(donated_buffer=False):
                result = compiled(*args, **kwargs)
        except AssertionError as problem:
            if "FakeTensor" not in str(problem):
                raise
            raise InputError(
                "the function reads a tensor that is neither an argument, a parameter nor a "
                "buffer; pass it in, or register it as a buffer"
            ) from problem
        self.known[key] = compiled
        return result

    def plan(self, examples: Sequence[Example]) -> None:
        """Decide for such inputs on fake tensors."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.optimiser.only_plans = True
        try:
            with fake:
                state = tree_map(lambda t: _like(t, fake), self._state())
                device = next((t.device for t in state.values()), torch.device("cpu"))
                args = [_example(e, fake, device, i == 0) for i, e in enumerate(examples)]
                self.optimiser.compiled(self._function())(state, *args)
        finally:
            self.optimiser.only_plans = False

    def _state(self) -> Mapping[str, Tensor]:
        """Parameters and buffers, each once, as named_parameters has them in twice the time."""
        found: dict[str, Tensor] = {}
        if not isinstance(self.target, nn.Module):
            return found
        seen: set[int] = set()
        for prefix, module in self.target.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = tensor
        return found

    def _function(self) -> Callable[..., Any]:
        target = self.target
        if not isinstance(target, nn.Module):
            return self._rewritten(lambda state, *args, **kwargs: target(*args, **kwargs))
        if self.owner is not None and self.owner.training != target.training:
            target.training = self.owner.training  # flags of submodules are shared, its own is not

        def run(state: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(target, state, args, kwargs)

        return self._rewritten(run)

    def _rewritten(self, function: Callable[..., Any]) -> Callable[..., Any]:
        memory = self.optimiser.memory
        return rewritten(function if memory is None else in_chunks(function, memory))

    def _key(self, state: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """What a call compiles for. Plain tensors are not taken apart: that takes 15 us."""
        leaves, spec = args, ""
        if kwargs or not all(isinstance(arg, Tensor) for arg in args):
            leaves, tree = tree_flatten((args, kwargs))
            spec = str(tree)
        kinds = tuple(_kind(leaf) for leaf in (*state.values(), *leaves))
        training = self.owner.training if self.owner is not None else None
        modes = torch.is_grad_enabled(), training, torch.is_autocast_enabled("cuda")
        return tuple(state), kinds, spec, modes


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad
    return repr(leaf)


def _example(example: Example, fake: FakeTensorMode, device: torch.device, first: bool) -> Tensor:
    if isinstance(example, Tensor):
        return cast(Tensor, _like(example, fake))
    shape, dtype = example
    # The first is the one that comes from other layers, others are tables and masks.
    wanted = first and dtype.is_floating_point
    return torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=wanted)


def _like(tensor: Any, fake: FakeTensorMode) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    return cast(Tensor, fake.from_tensor(tensor, static_shapes=True))


def _devices(module: fx.GraphModule) -> set[str]:
    """Where a graph's inputs are."""
    given = (n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder")
    return {value.device.type for value in given if isinstance(value, Tensor)}


def _of_metadata(module: fx.GraphModule) -> Callable[..., Any]:
    """Gives empty tensors in place of computing, for planning on fake tensors."""
    returned = next(n for n in module.graph.nodes if n.op == "output").args[0]
    made = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in returned]

    def run(*inputs: Any) -> list[Any]:
        del inputs
        return [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, Tensor)
            else v
            for v in made
        ]

    return run
