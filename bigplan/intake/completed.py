"""A file's training, completed from options: request, strategy, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.errors import InputError, RefusedError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.graph.strategy_space import splits_over_tensor_parallel
from bigplan.intake.setup import ALL, Recomputation, Setup
from bigplan.planner import Request
from bigplan.solve.pins import LOSS_CHUNK, Pin, parse_pins
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.document import validate
from bigplan.spec.model import ModelSpec
from bigplan.units import counted

OPEN = "micro_batch, recompute=none|selective|full, recompute.full=N, loss_chunk"
NAMED_WITHIN = 1.3  # Qwen3's 0.6B has 0.75 with a head of its own; 8B and 14B are 1.75 apart
UNSAID = "nothing is recomputed, unless --set recompute=full says that the model's code does"


@dataclass(frozen=True, slots=True)
class Options:
    """Decisions of --set that a file may leave open."""

    micro_batch: int | None = None
    again: Recomputation | None = None
    loss_chunk: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, str | int | float]) -> Options:
        """Read --set. Raises InputError for decisions that the file itself makes."""
        fixed, pins = parse_pins(settings)
        found = cls(fixed.pop("micro_batch", None))
        for name in fixed:
            raise InputError(f"--set {name}: the file says it; what can be set is {OPEN}")
        for pin in pins:
            match pin:
                case Pin(tensor="recompute", choice="none" | "selective" | "full" as how):
                    blocks = ALL if pin.amount is None else int(pin.amount)
                    found = replace(found, again=Recomputation(Recompute(how), blocks))
                case Pin(tensor=tensor, amount=amount) if tensor == LOSS_CHUNK and amount:
                    found = replace(found, loss_chunk=int(amount))
                case _:
                    raise InputError(
                        f"--set {pin.tensor}: the file says it; what can be set is {OPEN}"
                    )
        return found


@dataclass(frozen=True, slots=True)
class Completed:
    """A training ready to be priced."""

    setup: Setup
    request: Request
    strategy: Strategy
    again: Recomputation  # `blocks` of each chunk at most, limited to those there are
    loss_chunk: int


def completed(setup: Setup, experiment: Experiment, file: str) -> Completed:
    """Complete `experiment`, which is the file's training under the command line's options.

    Raises InputError that names a missing option, or settings that exclude each other, and
    RefusedError for models with experts.
    """
    options = Options.of(experiment.set)
    model = experiment.model_spec()
    if why := other_tools_refusal(model, None, "other tools"):
        raise RefusedError(f"{file}: {why}")
    _same_model(setup, model, file)
    _require(setup, experiment, options, file)
    cluster = _cluster(setup, experiment, file)
    setup, split = _split(setup, model)
    ways = split.get("tp", 1) * split.get("pp", 1)
    dp, rest = divmod(cluster.gpus, ways)
    if rest or not dp:
        raise InputError(
            f"{file}: splits over {counted(ways, 'GPU')} (tp {split.get('tp', 1)} x pp "
            f"{split.get('pp', 1)}), which do not divide the {cluster.gpus} of {cluster.name}; "
            "add --nodes N, or name the cluster that it runs on"
        )
    micro, whole = _batch(setup, experiment, options, dp, file)
    data: dict[str, Any] = {**split, "dp": dp, "micro_batch": micro}
    data |= _sharding(setup, split, dp, cluster.group.gpus_per_node, file)
    if "sequence_parallel" in data:
        data["sequence_parallel"] = bool(data["sequence_parallel"])
    strategy = validate(data, Strategy, file)
    _splits(model, strategy, file)
    training = experiment.training.model_copy(update={"global_batch": whole})
    request = Request(
        model,
        experiment.model_copy(update={"training": training}).resolved_training(),
        cluster,
        engine=setup.engine,
    )
    setup = _with_window(setup, model, request.training.sequence_length)
    setup = _with_flavor(setup, model)
    again = options.again or setup.again
    if again is None:
        setup, again = setup.with_told([UNSAID]), Recomputation()
    most = max(chunk_blocks(model.layers, strategy))
    again = replace(again, blocks=min(again.blocks, ceil(most / again.every)))
    tokens = micro * request.training.sequence_length
    return Completed(setup, request, strategy, again, min(options.loss_chunk or tokens, tokens))


def _sharding(
    setup: Setup, split: Mapping[str, int], dp: int, each: int, file: str
) -> dict[str, int]:
    """ZeRO's stage, and how many ranks share a copy, on nodes of `each` GPUs."""
    together = setup.copies.together(dp, each // split.get("tp", 1), file)
    zero = split.get("zero", 0) if together > 1 else 0  # one rank has nothing to shard
    return {"zero": zero, "zero_group": together if zero and together < dp else 0}


def _same_model(setup: Setup, model: ModelSpec, file: str) -> None:
    for name, value in setup.model.items():
        if not _has(model, name, value):
            raise InputError(
                f"{file}: trains a model whose {name} is {value}; that of --model {model.name} is "
                f"{getattr(model, name)}: name the model that the file trains"
            )


def _has(model: ModelSpec, name: str, value: str | int) -> bool:
    """Whether the model's field is that; of MLPs whether they are gated, which a price sees."""
    if name == "mlp":
        return model.gated == (value == "swiglu")
    return bool(getattr(model, name) == value)


def _with_flavor(setup: Setup, model: ModelSpec) -> Setup:
    """Tell a size by name that is another than the model's."""
    billions, has = setup.billions, model.parameter_count / 1e9
    if billions is None or 1 / NAMED_WITHIN < has / billions < NAMED_WITHIN:
        return setup
    told = f"flavor of {billions:g} B: priced as {model.name}, which has {has:.3g} B parameters"
    return setup.with_told((), (told,))


def _with_window(setup: Setup, model: ModelSpec, length: int) -> Setup:
    """Tell where Megatron-LM attends further than the model, which is priced."""
    window = model.window_within(length)
    if setup.engine != "megatron" or window is None or "sliding_window" in setup.model:
        return setup
    told = (
        f"attention to all {length} tokens: priced within the {window} of {model.name}, as by "
        f"--window-size {window - 1},0"
    )
    return setup.with_told((), (told,))


def _require(setup: Setup, experiment: Experiment, options: Options, file: str) -> None:
    """Raise InputError for all that a plan needs and no default can guess."""
    micro, whole, _ = _sizes(setup, experiment, options, dp=1)
    needed = {
        "--seq-len TOKENS": experiment.training.sequence_length,
        "--precision bf16|fp16|fp32": experiment.training.precision,
        "--set micro_batch=N": micro,
        "--global-batch N": whole,
    }
    if missing := [option for option, value in needed.items() if not value]:
        raise InputError(
            f"{file}: leaves to the command line what the price needs; add {' and '.join(missing)}"
        )


def _cluster(setup: Setup, experiment: Experiment, file: str) -> Cluster:
    """The cluster with as many nodes as the file starts processes for."""
    cluster, wanted = experiment.cluster_spec(), setup.processes
    if wanted is None or wanted == cluster.gpus or experiment.nodes is not None:
        return cluster  # --nodes wins over the file
    nodes, rest = divmod(wanted, cluster.group.gpus_per_node)
    if nodes and not rest and cluster.group.inter_node is not None:
        return cluster.with_nodes(nodes)
    raise InputError(
        f"{file}: starts {counted(wanted, 'process', 'processes')}, one for each GPU, and "
        f"{cluster.name} has {counted(cluster.gpus, 'GPU')}; add --nodes N, or name a cluster with "
        "as many"
    )


def _split(setup: Setup, model: ModelSpec) -> tuple[Setup, dict[str, int]]:
    """The split with virtual stages and uneven ends as numbers of blocks."""
    split = dict(setup.split)
    pp, each = split.get("pp", 1), split.pop("blocks_each", None)
    ends = [split.pop(f"{end}_less", 0) for end in ("first", "last")]
    if each:
        split["vpp"] = max(1, ceil((model.layers + sum(ends)) / each) // pp)
    if split.get("vpp", 1) > 1 and split.get("zero", 0) > 1:
        split["vpp"] = 1
        told = "virtual stages with sharded gradients: priced as one stage each"
        setup = setup.with_told((), [told])
    stages = pp * split.get("vpp", 1)
    if stages > 1 and any(ends):
        split |= dict(_ends(model.layers, stages, ends))
    return setup, split


def _ends(blocks: int, stages: int, less: list[int]) -> Iterator[tuple[str, int]]:
    """Blocks of the ends as torchtitan cuts: embedding and output count as so many more blocks."""
    each, more = divmod(blocks + sum(less), stages)
    first, last = each + (more > 0) - less[0], each - less[1]
    even, longer = divmod(blocks, stages)
    if (first, last) != (even + (longer > 0), even) and min(first, last) > 0:
        yield "first_blocks", first
        yield "last_blocks", last


def _sizes(
    setup: Setup, experiment: Experiment, options: Options, dp: int
) -> tuple[int | None, int | None, int | None]:
    """Sequences of a micro-batch and of a step, and micro-batches a step; None: left open."""
    stated, batch = experiment.training.global_batch, setup.batch
    micro, whole, times = options.micro_batch or batch.micro, stated or batch.whole, None
    if not stated:
        times = batch.accumulation or (1 if batch.alone and whole is None else None)
    if micro is None and whole and (batch.alone or times):
        micro = max(1, whole // (dp * (times or 1)))
    if whole is None and micro and times:
        whole = micro * times * dp
    return micro, whole, times


def _batch(
    setup: Setup, experiment: Experiment, options: Options, dp: int, file: str
) -> tuple[int, int]:
    """Sequences of a micro-batch, and of a step."""
    micro, whole, times = _sizes(setup, experiment, options, dp)
    assert micro and whole  # required above
    product = f"{counted(dp, 'data-parallel rank')} x micro-batches of {micro}"
    if whole % (micro * dp) or (times and whole != micro * times * dp):
        product += f" x {times} of them a step" if times else ""
        raise InputError(
            f"{file}: a step of {counted(whole, 'sequence')} is not made of {product}; correct the "
            "file, add --global-batch N, or name the cluster that it runs on"
        )
    return micro, whole


def _splits(model: ModelSpec, strategy: Strategy, file: str) -> None:
    """Raise InputError where a split leaves a rank without work."""
    wrong: dict[str, Any] = {}
    if not splits_over_tensor_parallel(model, strategy.tp):
        wrong["tp"] = strategy.tp
    chunks = chunk_blocks(model.layers, strategy)
    if min(chunks, default=0) < 1 or sum(chunks) != model.layers:
        wrong["pp"] = strategy.pp
    if wrong:
        told = " and ".join(f"{name} {value}" for name, value in wrong.items())
        raise InputError(
            f"{file}: {model.name} with {model.layers} blocks of {model.heads} heads does not "
            f"split by {told}; correct the file, or name the model that it trains"
        )
