"""Bytes that DeepSpeed takes of each tier, by what its code allocates (0.19.8).

In bytes a parameter, where a rank owns 1/d of the state, g bytes a summed gradient and p bytes a
16- or 32-bit parameter:

    GPU, ZeRO 0-2   p whole; g whole (ZeRO 0, 1) or g/d (ZeRO 2); 12/d of master and moments and,
                    while the optimizer steps, 4/d of fp32 gradients
    GPU, pipelines  as ZeRO 0 or 1 of the stage's layers; in bf16 both g and p whole; for every
                    micro-batch under way the stage's activations, its input, the input's
                    gradient and the output
    GPU, ZeRO 3     (p + g + 16)/d; the live parameters, which are gathered
    host, ZeRO 1-2  (16 + p + p)/d: master, its gradient and moments; what the GPU's copy is cast
                    into; sums of the micro-batches before the last
    host, ZeRO 3    (16 r + g)/d with a part r of the state there (Twin-Flow); + p/d of parameters
    NVMe            16/d of state with its gradient; p/d of parameters
    host for NVMe   16 buffers of 4 bytes an element of the largest sub-group; g/d; and 8/d of
                    moments between the first update and the second

torch rounds each page-locked block up to a power of two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigplan.cost.costs import Costs
from bigplan.cost.process import block_of, locked_bytes
from bigplan.engines.deepspeed.config import accumulated_in
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.sizes import BufferSizes
from bigplan.graph.graph import Graph, Recompute
from bigplan.placement import Tier
from bigplan.plan import MemoryUse
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import DTYPE_BYTES, Training

MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes an element, always fp32


@dataclass(frozen=True)
class StageHoldings:
    """What decides how much memory a rank of a pipeline stage holds on each tier."""

    graph: Graph
    training: Training
    decisions: Decisions
    sizes: BufferSizes
    at: int = 0  # the pipeline stage

    @cached_property
    def layers(self) -> list[str]:
        """The kinds of the stage's layers."""
        return [self.graph.layers[layer] for layer in self.graph.stage_layers(self.at)]

    @cached_property
    def parameters(self) -> int:
        """Elements of the stage; a table that two stages share counts in full on both."""
        kinds, last = self.graph.kinds, self.at == self.graph.strategy.pp - 1
        copy = self.graph.lends_table and last
        table = kinds["embedding"].parameters if copy else 0
        return table + sum(kinds[name].parameters for name in self.layers)

    @property
    def owned(self) -> int:
        """Elements of state of a rank: all of them without ZeRO."""
        strategy = self.graph.strategy
        ranks = strategy.zero_group or strategy.dp
        return -(-self.parameters // (ranks if self.decisions.stage else 1))

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the stage holds at once."""
        return self.graph.in_flight_units(self.at)

    @property
    def gradient(self) -> int:
        """Bytes of a summed gradient."""
        return DTYPE_BYTES[accumulated_in(self.decisions, self.training)]

    def gpu(self) -> dict[str, int]:
        """Bytes of a GPU by purpose, at the worst moment of a step."""
        parts = {
            "parameters": self._parameters(),
            "gradients": self._gradients(),
            "optimizer": self._state(),
        }
        backward = {"activations": self._activations(), "workspace": self._workspace()}
        update = {"workspace": self._updating()}
        worse = max(backward, update, key=lambda part: sum(part.values()))
        return {name: nbytes for name, nbytes in (parts | worse).items() if nbytes}

    def _parameters(self) -> int:
        p, stage = self.graph.sizes.parameter, self.decisions.stage
        if stage < 3:
            return p * self.parameters
        kinds = self.graph.kinds
        ends = max(kinds["embedding"].parameters, kinds["head"].parameters)
        gathered = min(self.sizes.live + ends, self.parameters)
        if self.decisions.parameters is not Tier.GPU:
            return p * gathered
        # A single rank gathers nothing: it uses its part in place.
        return p * (self.owned + (gathered if self.graph.strategy.dp > 1 else 0))

    def _gradients(self) -> int:
        stage, elements = self.decisions.stage, self.owned
        bucket = self.sizes.bucket * self.graph.sizes.parameter * 2  # one fills, one leaves
        if self.decisions.state is not Tier.GPU:
            # Sums of ZeRO 1 and 2 pass through this buffer on their way to the CPU and back.
            passing = self.sizes.largest * self.graph.sizes.parameter if stage < 3 else 0
            whole = self.graph.sizes.parameter * self.parameters if self.piped else 0
            return whole + bucket + passing
        p = self.graph.sizes.parameter
        if stage < 2:
            elements = self.parameters
        # Where sums are wider than the gradients that autograd gives, ZeRO 1 holds both until the
        # backward ends. So does the optimizer of every pipeline in bf16 without ZeRO.
        apart = (stage == 1 and self.gradient != p) or (self.piped and not stage and p < 4)
        beside = p * elements if apart else 0
        return self.gradient * elements + beside + (bucket if stage else 0)

    @property
    def piped(self) -> bool:
        """Whether the model is cut into stages."""
        return self.graph.strategy.pp > 1

    @property
    def resident(self) -> int:
        """Elements whose state is on the GPU."""
        if self.decisions.state is Tier.GPU:
            return self.owned
        return self.sizes.resident(self.decisions.on_cpu)

    @property
    def away(self) -> int:
        """Elements whose state is in host memory or on a drive."""
        return self.owned - self.resident

    def _state(self) -> int:
        master = MASTER if self.graph.sizes.master or self.decisions.stage else 0
        resident = self.resident
        # Twin-Flow also keeps the fp32 gradients of the GPU's part on the GPU.
        gradients = GRADIENT if self.decisions.on_cpu < 1.0 else 0
        return resident * (master + MOMENTS + gradients)

    def _updating(self) -> int:
        """Bytes while the GPU's optimizer steps: gradients flattened, and cast to fp32."""
        alone = self.decisions.stage == 0 and not self.graph.sizes.master
        if self.decisions.state is not Tier.GPU or alone:
            return 0
        elements = self.owned if self.decisions.stage < 3 else self.sizes.sub_group
        return elements * (self.gradient + GRADIENT)

    def _activations(self) -> int:
        again = Recompute.FULL if self.decisions.recompute else Recompute.NONE
        kinds = [self.graph.kinds[name] for name in self.layers]
        each = sum(k.kept(again) if k.stores_activations else k.boundary for k in kinds)
        if not self.piped:
            return each
        # Each micro-batch has its input, which autograd copies, the input's gradient, and the
        # output. Two more buffers receive hidden states and gradients.
        boundary = self.graph.kinds["block"].boundary
        return self.in_flight * (each + 3 * boundary) + 2 * boundary

    def _workspace(self) -> int:
        """Bytes of a block's backward with what it recomputed, or of the loss and its gradients."""
        block, head = self.graph.kinds["block"], self.graph.kinds["head"]
        again = block.saved if self.decisions.recompute else 0
        gradients = block.parameters * self.graph.sizes.parameter
        # The loss sums gradients in fp32 and gives them in the parameters' precision.
        sums = head.parameters * (4 + self.graph.sizes.parameter)
        loss = head.backward_workspace + sums if "head" in self.layers else 0
        return max(again + block.backward_workspace + gradients, loss)

    def host(self) -> Iterator[tuple[str, int]]:
        """Blocks of a rank's host memory: their purpose, and bytes."""
        p, decisions = self.graph.sizes.parameter, self.decisions
        on_cpu = self.away
        if decisions.parameters is Tier.HOST:
            yield "parameters", p * self.owned
        if decisions.parameters is Tier.NVME:
            yield "staging", p * self.sizes.swap_buffers * self.sizes.swap_buffer
        if decisions.state is Tier.HOST:
            yield "optimizer", MASTER * on_cpu
            yield "gradients", GRADIENT * on_cpu
            yield "optimizer", MOMENTS * on_cpu
            if decisions.stage < 3:
                yield "staging", p * self.owned
                yield "staging", p * self.sizes.largest
                if self.graph.micro_batches > 1:
                    yield "gradients", p * self.owned
        if decisions.state is Tier.NVME:
            for _ in range(self.sizes.buffers):
                yield "staging", GRADIENT * self.sizes.swapped
            # The first update makes moments in ordinary memory and writes them. They stay there
            # until the second update reads them, because the swapper that reads ahead releases
            # nothing (pipelined_optimizer_swapper.py has no release_memory in its swap_out).
            yield "optimizer", MOMENTS * on_cpu
        if decisions.state is not Tier.GPU and decisions.stage == 3:
            yield "gradients", self.gradient * self.owned

    @property
    def first_values(self) -> int:
        """Bytes of the largest parameter while it is made, in fp32 and in its own precision.

        Every rank makes each parameter whole (runtime/deepspeed/model.py).
        """
        tensors = (tensor for kind in self.graph.kinds.values() for tensor in kind.tensors)
        return (MASTER + self.graph.sizes.parameter) * max(each.elements for each in tensors)

    def nvme(self) -> dict[str, int]:
        """Bytes of a rank on drives."""
        found = {}
        if self.decisions.parameters is Tier.NVME:
            found["parameters"] = self.graph.sizes.parameter * self.owned
        if self.decisions.state is Tier.NVME:
            found |= {
                "optimizer": (MASTER + MOMENTS) * self.owned,
                "gradients": GRADIENT * self.owned,
            }
        return found


def memory_use(
    every: Sequence[StageHoldings], costs: Costs, nodes: NodeGroup
) -> tuple[MemoryUse, ...]:
    """Memory of every tier and stage, against its capacity."""
    return tuple(use for held in every for use in _of_stage(held, costs, nodes))


def _of_stage(held: StageHoldings, costs: Costs, nodes: NodeGroup) -> Iterator[MemoryUse]:
    sharing, host = costs.sharing, defaultdict[str, int](int)
    exact = held.decisions.own_pinning or nodes.gpu.device != "cuda"
    for purpose, nbytes in held.host():
        host[purpose] += sharing.counted(nbytes if exact else block_of(nbytes), "node")
    placed = sum(host.values())
    values = sharing.counted(held.first_values, "node")
    host["processes"] = costs.processes + values + locked_bytes(nodes, placed)
    most = costs.capacity[Tier.HOST]
    capacity = {
        Tier.GPU: costs.capacity[Tier.GPU],
        Tier.HOST: most + costs.processes + locked_bytes(nodes, most),
        Tier.NVME: costs.capacity[Tier.NVME],
    }
    by_tier = {
        Tier.GPU: held.gpu(),
        Tier.HOST: dict(host),
        Tier.NVME: {name: sharing.counted(n, "node") for name, n in held.nvme().items()},
    }
    for tier, purposes in by_tier.items():
        yield MemoryUse(
            stage=held.at,
            tier=tier,
            scope=tier.scope,
            used_bytes=sum(purposes.values()),
            capacity_bytes=capacity[tier],
            by_purpose={name: n for name, n in sorted(purposes.items()) if n},
        )
