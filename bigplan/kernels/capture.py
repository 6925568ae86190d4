"""Graphs of torch functions: from AOTAutograd's joint graph to ours, and back to modules that run.

AOTAutograd traces forward and backward on fake tensors, makes mutations functional and asks a
partitioner for a forward and a backward module. Our modules follow a plan: a call for each
generated kernel, torch's own operators between the calls, and views where something reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from bigplan.kernels.fusion.cover import CoverUnit
from bigplan.kernels.fusion.graph import Arg, Argument, KernelGraph, KernelNode, KernelValue, frozen
from bigplan.kernels.fusion.keep import AGAIN, KeepPlan

NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.bool: "bool", torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8",
}  # fmt: skip
MakeKernel = Callable[[CoverUnit], Callable[..., tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Captured:
    """A graph, and the fx nodes that its nodes and values come from."""

    graph: KernelGraph
    nodes: Mapping[str, fx.Node]  # by the name of a node of ours
    values: Mapping[str, fx.Node]  # by the name of a value
    names: Mapping[fx.Node, str]
    outputs: tuple[str | None, ...]  # of the joint graph
    inputs: tuple[str, ...]


def captured(joint: fx.GraphModule, forward_outputs: int) -> Captured:
    """Our graph of a joint one whose first so many outputs are the forward's."""
    returned = next(n for n in joint.graph.nodes if n.op == "output").args[0]
    forward = _ancestors(returned[:forward_outputs])
    names: dict[fx.Node, str] = {}
    values: dict[str, fx.Node] = {}
    found: dict[str, fx.Node] = {}
    inputs: list[KernelValue] = []
    nodes: list[KernelNode] = []
    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            names[node], values[node.name] = node.name, node
            if isinstance(node.meta.get("val"), Tensor):
                inputs.append(_value(node.name, node.meta["val"]))
            continue
        if node.target is operator.getitem:
            source, index = node.args
            names[node] = f"{source.name}.{index}"
            values[names[node]] = node
            continue
        names[node], values[node.name], found[node.name] = node.name, node, node
        nodes.append(_node(node, names, backward=node not in forward))
    outputs = tuple(names[n] if isinstance(n, fx.Node) else None for n in returned)
    given = [(i, name) for i, name in enumerate(outputs) if name is not None]
    graph = KernelGraph(
        tuple(inputs),
        tuple(nodes),
        tuple(name for _, name in given),
        sum(i < forward_outputs for i, _ in given),
    )
    placeholders = tuple(n.name for n in joint.graph.nodes if n.op == "placeholder")
    return Captured(graph, found, values, names, outputs, placeholders)


def _ancestors(nodes: Sequence[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node for node in nodes if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _value(name: str, tensor: Tensor) -> KernelValue:
    return KernelValue(
        name,
        tuple(map(int, tensor.shape)),
        NAMES.get(tensor.dtype, str(tensor.dtype)),
        tuple(map(int, tensor.stride())),
    )


def _node(node: fx.Node, names: Mapping[fx.Node, str], *, backward: bool) -> KernelNode:
    made = node.meta.get("val")
    outputs: tuple[KernelValue, ...] = ()
    if isinstance(made, Tensor):
        outputs = (_value(node.name, made),)
    elif isinstance(made, tuple | list):
        given = ((i, one) for i, one in enumerate(made) if one is not None)
        outputs = tuple(
            _value(f"{node.name}.{i}", one)
            if isinstance(one, Tensor)
            else KernelValue(f"{node.name}.{i}", (), "int64", ())  # flash attention's lengths, say
            for i, one in given
        )
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        read = {"inputs": tuple(Arg(names[n]) for n in node.all_input_nodes)}
        called = node.op if node.op != "call_function" else getattr(target, "__name__", str(target))
        return KernelNode(
            node.name, str(called), read, outputs, backward, "it is no operator of ATen"
        )
    arguments_of = zip(target._schema.arguments, node.args, strict=False)
    arguments = {entry.name: _argument(given, names) for entry, given in arguments_of}
    arguments |= {name: _argument(given, names) for name, given in node.kwargs.items()}
    refused = _refused(target, node, outputs)
    name = target.overloadpacket.__name__
    return KernelNode(node.name, name, frozen(arguments), outputs, backward, refused)


def _refused(target: Any, node: fx.Node, outputs: tuple[KernelValue, ...]) -> str:
    """Why an operator is left to torch, whatever it computes."""
    if target._schema.is_mutable:
        return "it writes into its input"
    tensors = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    devices = {t.device.type for t in tensors if isinstance(t, Tensor)}
    if len(devices) > 1:
        return "its tensors are on several devices"
    # A sum's kernel knows what autograd asked for: results that are left out have no buffer.
    strange = {v.dtype for v in outputs} & {"fp64"}
    return "it computes in fp64" if strange else ""


def _argument(given: Any, names: Mapping[fx.Node, str]) -> Argument:
    if isinstance(given, fx.Node):
        return Arg(names[given])
    if isinstance(given, tuple | list):
        return tuple(_argument(item, names) for item in given)
    if given is None or isinstance(given, bool | int | float | str):
        return given
    return str(given)


def norm_of_statistics(
    x: Tensor, statistics: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The output of a norm whose (mean and) reciprocal deviation are known, in the dtype of x."""
    wide = x.float()
    *mean, rstd = statistics
    out = (wide - mean[0] if mean else wide) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


class Region:
    """The forward or backward half of a plan as an fx module."""

    def __init__(self, plan: KeepPlan, source: Captured, make: MakeKernel | None) -> None:
        self.plan, self.source, self.make = plan, source, make
        self.graph = fx.Graph()
        self.made: dict[str, fx.Node] = {}
        self.originals = {node.name: node for node in source.graph.nodes}

    def module(
        self, inputs: Sequence[str], outputs: Sequence[str | None], *, backward: bool
    ) -> fx.GraphModule:
        """A module from these values to those."""
        for name in inputs:
            placeholder = self.graph.placeholder(name.replace(".", "_"))
            self._enter(name, placeholder)
        for unit in self.plan.cover.units:
            if unit.members[0].backward == backward:
                self._unit(unit)
        results = [None if name is None else self._value(name) for name in outputs]
        end = self.graph.output(results)
        end.meta = {}
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _enter(self, name: str, node: fx.Node) -> fx.Node:
        origin = self.source.values.get(name.removeprefix(AGAIN))
        if origin is not None:
            node.meta = {k: v for k, v in origin.meta.items() if k in ("val", "tensor_meta")}
        self.made[name] = node
        return node

    def _unit(self, unit: CoverUnit) -> None:
        if unit.fused is None or self.make is None:
            for node in unit.members:
                self._node(node)
            return
        body = unit.fused.body
        inputs = tuple(self._start_of(value.name) for value in body.inputs)
        call = self.graph.call_function(self.make(unit), inputs)
        for index, value in enumerate(body.outputs):
            self._enter(value.name, self.graph.call_function(operator.getitem, (call, index)))

    def _start_of(self, name: str) -> fx.Node:
        """A tensor that begins where a value does, best without a view: kernels know the strides.

        A view costs the host 5 to 30 us. A residual block's forward had 24 of them.
        """
        base = self.plan.graph.base[name]
        if base in self.made and self._begins(base) == self._begins(name):
            return self.made[base]
        return self._value(name)

    def _begins(self, name: str) -> tuple[int, torch.dtype] | None:
        origin = self.source.values.get(name.removeprefix(AGAIN))
        made = None if origin is None else origin.meta.get("val")
        return (int(made.storage_offset()), made.dtype) if isinstance(made, Tensor) else None

    def _value(self, name: str) -> fx.Node:
        if name not in self.made:
            node = self.plan.graph.producer[name]
            assert node.layout, f"{name} is read before {node.name} runs"
            self._node(node)
        return self.made[name]

    def _node(self, node: KernelNode) -> None:
        if node.op == "norm_of_statistics":
            read = node.arguments
            names = [read.get(part) for part in ("mean", "rstd")]
            statistics = tuple(self._ref(name) for name in names if name is not None)
            arguments = (self._ref(read["input"]), statistics, self._ref(read.get("weight")),
                         self._ref(read.get("bias")))  # fmt: skip
            made = self.graph.call_function(norm_of_statistics, arguments)
            self._enter(node.outputs[0].name, made)
            return
        name = node.name.removeprefix(AGAIN)
        origin = self.source.nodes[name]
        renamed = dict(zip(self.originals[name].refs(), node.refs(), strict=True))

        def there(arg: fx.Node) -> fx.Node:
            known = self.source.names[arg]
            return self._value(renamed.get(known, known))

        made = self.graph.node_copy(origin, there)
        made.meta = {k: v for k, v in origin.meta.items() if k in ("val", "tensor_meta")}
        for value in node.outputs:
            index = value.name.removeprefix(node.name)
            if not index:
                self.made[value.name] = made
            else:
                item = self.graph.call_function(operator.getitem, (made, int(index[1:])))
                self._enter(value.name, item)
        if not node.outputs:
            self.made[node.name] = made

    def _ref(self, argument: Argument) -> fx.Node | None:
        return self._value(argument.name) if isinstance(argument, Arg) else None


def halves(
    plan: KeepPlan, source: Captured, forward_outputs: int, make: MakeKernel | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward modules of a plan, as AOTAutograd wants them of a partitioner."""
    primals = [name for name in source.inputs if not name.startswith("tangents")]
    tangents = [name for name in source.inputs if name.startswith("tangents")]
    given, gradients = source.outputs[:forward_outputs], source.outputs[forward_outputs:]
    again = {AGAIN + name for name in plan.graph.values}
    swapped = dict(zip((n for n in source.outputs if n), plan.graph.outputs, strict=True))
    gradients = tuple(swapped[n] if n else None for n in gradients)
    assert not again & set(plan.kept)
    ahead = Region(plan, source, make).module(primals, (*given, *plan.kept), backward=False)
    back = Region(plan, source, make).module((*plan.kept, *tangents), gradients, backward=True)
    return ahead, back
