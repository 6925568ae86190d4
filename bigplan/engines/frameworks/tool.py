"""Training frameworks in common use: what each can be told to do, and how it behaves.

Each rule here is the tool's own, from its documentation or source. The behaviours are those with
which its published runs are priced (cost/framework.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.capabilities.splits import WITH_EXPERTS, expert_parallel_refusal
from bigplan.cost.framework import FSDP, MEGATRON_CORE, Framework
from bigplan.engines.frameworks.way import Way
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.graph.strategy_space import divisors
from bigplan.spec.model import ModelSpec
from bigplan.spec.rope_scaling import RopeScaling
from bigplan.spec.training import Training


@dataclass(frozen=True, slots=True)
class Tool:
    """One training framework."""

    name: str
    behaviour: Framework
    splits: Callable[
        [ModelSpec, Strategy], str | None
    ]  # why it does not split the model like this; None: it does
    trains: Callable[[ModelSpec, Training], str | None]  # why it does not train this; None: it does
    counts_blocks: bool = False  # it recomputes some blocks of a stage; otherwise all or none
    offloaded: tuple[float, ...] = ()  # shares of the optimizer state that may be on the CPU
    # Whether parameters, gradients and state may leave the GPU; they leave together.
    offloads: Callable[[Strategy], bool] = lambda strategy: False
    recomputes: Callable[[Strategy], bool] = lambda strategy: True
    pads_vocabulary: bool = False  # to a multiple of 128 x tensor parallelism
    reduces_low: bool = False  # gradients are reduced in the precision of compute
    hybrid: tuple[int, ...] = ()  # ZeRO's stages that may shard over groups of ranks

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """Why the tool cannot execute this request; None: it can."""
        if strategy.cp > 1:
            return (
                f"bigplan does not price how {self.name} exchanges keys and values between "
                f"context-parallel ranks: cp {strategy.cp} needs --engine native"
            )
        if strategy.accumulation_group > 1:
            return f"{self.name} passes one micro-batch after the other through all layers"
        return (
            self.untrained(model, training)
            or self._spreads(model, strategy)
            or self._groups(model, strategy)
            or self.splits(model, strategy)
        )

    def _spreads(self, model: ModelSpec, strategy: Strategy) -> str | None:
        """Why the tool does not have the model's experts on so many ranks; None: it has."""
        ep = strategy.ep
        if why := expert_parallel_refusal(ep, model, self.name):
            return why
        if ep > 1 and model.experts % ep:
            return f"ep {ep} does not divide the {model.experts} experts of {model.name}"
        if model.experts and strategy.tp > 1 and not strategy.sequence_parallel:
            return f"{self.name} has experts and tensor parallelism with sequence_parallel alone"
        return None

    def _groups(self, model: ModelSpec, strategy: Strategy) -> str | None:
        """Why the tool does not shard over groups of so many ranks; None: it does."""
        ranks = strategy.zero_group
        if not ranks:
            return None
        if not self.hybrid:
            return (
                f"zero_group {ranks}: bigplan writes no sharding over groups of ranks for "
                f"{self.name}; leave zero_group out, or plan with --engine megatron"
            )
        if strategy.zero not in self.hybrid:
            stages = " or ".join(map(str, self.hybrid))
            return (
                f"zero_group {ranks} with zero {strategy.zero}: {self.name} shards over groups of "
                f"ranks with zero {stages}"
            )
        if model.experts:
            return (
                f"zero_group {ranks}: bigplan does not price how {self.name} shards experts over "
                "groups of ranks; leave zero_group out"
            )
        return None

    def spread(self, model: ModelSpec, strategy: Strategy) -> list[int]:
        """Numbers of ranks that may have an equal part of the experts each."""
        if not model.experts or self.name not in WITH_EXPERTS:
            return [1]
        return divisors(gcd(model.experts, strategy.shards * strategy.tp))

    def untrained(self, model: ModelSpec, training: Training) -> str | None:
        """Why the tool does not train this, however it is split; None: it does."""
        return other_tools_refusal(model, training, self.name) or self.trains(model, training)

    def padded(self, model: ModelSpec, strategy: Strategy) -> ModelSpec:
        """The model with the words that the tool adds to its vocabulary."""
        if not self.pads_vocabulary:
            return model
        unit = 128 * strategy.tp
        return model.model_copy(update={"vocab": -(-model.vocab // unit) * unit})

    def trained(self, training: Training) -> Training:
        """The training with the precision in which the tool reduces gradients."""
        if not self.reduces_low:
            return training
        return training.model_copy(update={"reduce_precision": training.precision})

    def homes(self, strategy: Strategy) -> Iterator[Way]:
        """Tiers that state and parameters may have, the GPU first."""
        yield Way(strategy)
        if self.offloads(strategy):
            yield Way(strategy, on_cpu=1.0, parameters_on_host=True)
        # Megatron-LM does this with its distributed optimizer.
        if strategy.zero == 1 or strategy.dp == 1:
            yield from (Way(strategy, on_cpu=share) for share in self.offloaded)

    def counts(self, model: ModelSpec, strategy: Strategy) -> range:
        """How many blocks of a chunk the tool may recompute, besides none."""
        if not self.recomputes(strategy):
            return range(0)
        chunks = chunk_blocks(model.layers, strategy)
        even = min(chunks) == max(chunks)
        return range(1 if self.counts_blocks and even else max(chunks), max(chunks) + 1)

    def problems(self, way: Way, model: ModelSpec) -> Iterator[str]:
        """What the tool cannot do of a requested way."""
        if way.policy not in (Recompute.NONE, Recompute.FULL):
            yield f"{self.name} is not told to recompute a block in part"
        if way.again and way.again not in self.counts(model, way.strategy):
            yield f"{self.name} recomputes all blocks or none, not {way.again} of each stage"
        if not any(
            (home.on_cpu > 0) == (way.on_cpu > 0)
            and home.parameters_on_host == way.parameters_on_host
            for home in self.homes(way.strategy)
        ):
            yield f"{self.name} cannot place parameters and optimizer state like this"


def _shards_all(strategy: Strategy) -> bool:
    """Whether it shards as fully_shard does, which may offload on one GPU as well."""
    return strategy.zero == 3 or strategy.dp == 1


def _shards_out(strategy: Strategy) -> bool:
    """Whether it shards as torchtitan does, which shards and offloads nothing on one GPU."""
    return strategy.zero == 3 and strategy.pp == 1


def _replicates(strategy: Strategy) -> bool:
    """Whether it replicates as DistributedDataParallel does."""
    return strategy.dp > 1 and strategy.zero == 0


def _megatron_splits(model: ModelSpec, strategy: Strategy) -> str | None:
    between = chunk_blocks(model.layers, strategy)
    between = between[strategy.first_blocks > 0 : len(between) - (strategy.last_blocks > 0)]
    if len(set(between)) > 1:
        return (
            "Megatron-LM gives all stages but the first and the last equally many blocks, so "
            f"{model.layers} do not split over pp {strategy.pp} like this: set first_blocks or "
            "last_blocks"
        )
    if strategy.zero > 1 and (strategy.pp > 1 or strategy.vpp > 1):
        return f"ZeRO {strategy.zero} is Megatron FSDP, which has no pipelines: use zero 0 or 1"
    return None


def _megatron_trains(model: ModelSpec, training: Training) -> str | None:
    if model.positions == "alibi" or model.parallel_residual or model.embedding_norm:
        return (
            f"Megatron-LM has no linear biases, parallel residuals or embedding norm: {model.name}"
        )
    scaling = model.rope_scaling
    if scaling is not None and (model.latent_attention is None or not _has_yarn(scaling)):
        return f"bigplan writes no {scaling.name} scaling of rotary angles for Megatron-LM"
    return _no_groups("Megatron-LM", training)


# YaRN of latent attention in MLATransformerConfig (Megatron Core): no option sets these.
YARN = {"original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def _has_yarn(scaling: RopeScaling) -> bool:
    """Whether Megatron-LM's latent attention turns angles by it; it has both scales, or neither."""
    told = ((getattr(scaling, key) or usual) == usual for key, usual in YARN.items())
    both = bool(scaling.mscale) == bool(scaling.mscale_all_dim)
    return scaling.name == "yarn" and both and all(told)


def _no_groups(tool: str, training: Training) -> str | None:
    if training.optimizer.groups:
        return f"bigplan writes no weight decay and rates of single parameters for {tool}"
    return None


def _nemo_splits(model: ModelSpec, strategy: Strategy) -> str | None:
    if strategy.zero > 1 or strategy.first_blocks or strategy.last_blocks:
        return "bigplan writes neither ZeRO 2 and 3 nor uneven stages for NeMo"
    return _megatron_splits(model, strategy)


def _fsdp_splits(model: ModelSpec, strategy: Strategy) -> str | None:
    if strategy.tp > 1 or strategy.pp > 1:
        return f"FSDP2 splits by data alone, not by tp {strategy.tp} and pp {strategy.pp}"
    if strategy.dp > 1 and strategy.zero < 2:
        return f"fully_shard shards gradients too: use zero 2 or 3, not {strategy.zero}"
    return None


def _accelerate_splits(model: ModelSpec, strategy: Strategy) -> str | None:
    if _replicates(strategy) and strategy.tp == strategy.pp == 1:
        return None
    return _fsdp_splits(model, strategy)


def _fsdp_trains(model: ModelSpec, training: Training) -> str | None:
    return None  # the model and its optimizer are the user's own code


def _accelerate_trains(model: ModelSpec, training: Training) -> str | None:
    if training.reduce_precision not in (None, training.precision):
        return (
            f"accelerate reduces gradients in the precision of compute, {training.precision}, not "
            f"in {training.reduce_precision}: leave reduce_precision out"
        )
    return None


def whole_beside_others(strategy: Strategy) -> bool:
    """Whether replicas are whole beside another split, for which torchtitan 0.2.2 has no way.

    `parallelize_llama` raises "DDP has not supported > 1D parallelism".
    """
    return strategy.zero < 2 and strategy.shards == strategy.dp > 1 < strategy.tp * strategy.pp


def _torchtitan_splits(model: ModelSpec, strategy: Strategy) -> str | None:
    if strategy.zero == 1:
        return "torchtitan shards gradients as well (zero 2) or nothing"
    if whole_beside_others(strategy):
        return (
            f"torchtitan has replicas (zero 0) beside no other split, not with tp {strategy.tp} "
            f"and pp {strategy.pp}: use zero 2 or 3"
        )
    if strategy.first_blocks or strategy.last_blocks:
        return "bigplan writes no uneven stages for torchtitan"
    if strategy.vpp > 2:
        return f"torchtitan's Interleaved1F1B has two virtual stages by default, not {strategy.vpp}"
    if not strategy.sequence_parallel:
        return "torchtitan has tensor parallelism with sequence parallelism alone"
    return None


def _torchtitan_trains(model: ModelSpec, training: Training) -> str | None:
    if training.optimizer.name != "adamw":
        return f"torchtitan updates by AdamW here, not by {training.optimizer.name}"
    if training.precision == "fp16":
        return "torchtitan computes in bf16 or fp32, not in fp16"
    if training.gradient_precision != "fp32":
        return (
            f"torchtitan reduces gradients in fp32, not in {training.gradient_precision}: "
            "use --gradient-precision fp32"
        )
    if window := model.window_within(training.sequence_length):
        return (
            f"torchtitan's Llama attends to all {training.sequence_length} tokens of a sequence, "
            f"{model.name} to {window}: use a sequence_length of at most {window}"
        )
    if unlike := unlike_torchtitan(model):
        return f"torchtitan has the blocks of Llama and Qwen3, and {model.name} has {unlike}"
    return _no_groups("torchtitan", training)


# What torchtitan's models of dense decoders (llama3 and qwen3 of 0.2) have, as fields of a model.
TORCHTITAN_BLOCKS: Mapping[str, object] = {
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "positions": "rope",
    "rotary_fraction": 1.0,
    "parallel_residual": False,
    "qkv_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
}


def unlike_torchtitan(model: ModelSpec) -> str:
    """What of the model's blocks torchtitan has not, as keys with their values; empty: nothing."""
    other = (key for key, usual in TORCHTITAN_BLOCKS.items() if getattr(model, key) != usual)
    return ", ".join(f"{key} {getattr(model, key)}" for key in other)


# Compiled as by torchtitan's `compile.enable` for model and loss, which its published runs use.
COMPILED = replace(FSDP, compiled_loss=True, compiles_loss=True)
# Overlapped as by `--tp-comm-overlap`, which `bigplan config` writes.
OVERLAPPED = replace(MEGATRON_CORE, tensor_exposed=MEGATRON_CORE.tensor_exposed_async)
OFFLOADED = (0.25, 0.5, 0.75, 1.0)  # tried values of Megatron-LM's optimizer_offload_fraction

TOOLS = (
    Tool(
        "fsdp2",
        FSDP,
        _fsdp_splits,
        _fsdp_trains,
        counts_blocks=True,
        offloads=_shards_all,
        hybrid=(2, 3),
    ),
    Tool(
        "accelerate",
        FSDP,
        _accelerate_splits,
        _accelerate_trains,
        offloads=_shards_all,
        recomputes=lambda strategy: not _replicates(strategy),  # by a key of FSDP's
        reduces_low=True,  # its policy has one dtype for parameters and reductions
        hybrid=(2, 3),
    ),
    Tool(
        "megatron",
        OVERLAPPED,
        _megatron_splits,
        _megatron_trains,
        counts_blocks=True,
        offloaded=OFFLOADED,
        pads_vocabulary=True,
        hybrid=(1, 2, 3),
    ),
    Tool(
        "torchtitan",
        COMPILED,
        _torchtitan_splits,
        _torchtitan_trains,
        offloads=_shards_out,
        hybrid=(2, 3),
    ),
    Tool(
        "nemo",
        OVERLAPPED,
        _nemo_splits,
        _megatron_trains,
        counts_blocks=True,
        pads_vocabulary=True,
    ),
)
