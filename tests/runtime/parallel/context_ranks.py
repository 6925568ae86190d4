"""Plans of ranks that split sequences, for the processes of sharded_ranks to run."""

from __future__ import annotations

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, Tier
from bigplan.plan import Plan
from bigplan.spec.model import ModelSpec
from tests.runtime.masked import masked_training
from tests.runtime.parallel.sharded_ranks import (
    DELTA_RULE,
    FALCON_H1,
    GEMMA4,
    GEMMA4_E,
    GPT2,
    GPT_OSS,
    GRANITE_4,
    LATENT,
    MASKED,
    OLMO_HYBRID,
    QWEN3_NEXT,
    all_resident,
    anywhere,
    drawn,
    name_of,
    placed_everywhere,
    sharded_plans,
)
from tests.runtime.plans import SHORT, placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

TWO = Strategy(dp=1, cp=2)
BLOOM = {
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "positions": "alibi",
    "embedding_norm": True,
    "tied_embeddings": True,
    "kv_heads": 4,
}
LFM2: dict[str, object] = {
    "convolution": {"taps": 4, "bias": True},
    "mixer_pattern": ("1 convolution", "1 attention"),
}
LFM3 = LFM2 | {
    "norms": "around",
    "qk_norm": True,
    "attention_gate": True,
    "gate_of_heads": True,
    "attention_pattern": ("2 local", "2 global"),
    "sliding_window": 5,
}
LARA_MINI = DELTA_RULE | {
    "mixer_pattern": ("1 delta_rule", "1 attention"),
    "attention_pattern": ("2 local", "2 global"),
    "sliding_window": 5,
    "global_rope": False,
}
IN_TURNS: dict[str, object] = {"mixer_pattern": ("1 delta_rule", "1 attention")}
EVERY_MIXER: dict[str, object] = {
    **LFM2,
    **DELTA_RULE,
    **GRANITE_4,
    "layers": 4,
    "mixer_pattern": ("1 state_space", "1 convolution", "1 delta_rule", "1 attention"),
    "sliding_window": 5,
}
# Random models are in the test of a block, beside what they exchange; EVERY_MIXER has four ranks.
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": GPT2,
    "bloom": BLOOM,
    "mistral": {"sliding_window": 5},  # windows reach over the border of parts
    "deepseek": LATENT,
    "gemma-4": GEMMA4 | {"attention_pattern": ("1 local", "1 global")},
    "gemma-4-e": GEMMA4_E | {"layers": 4},
    "gpt-oss": GPT_OSS,
    "lfm3": LFM3,
    "lara-mini": LARA_MINI,
    # The plain loop balances over whole sequences.
    "qwen3-next": QWEN3_NEXT | IN_TURNS | {"router_loss": 0.0},
    "falcon-h1": FALCON_H1,
}


def layouts(ranks: int) -> list[Strategy]:
    """The ways to split a step over so many ranks, sequences among them."""
    if ranks == 2:
        return [TWO.model_copy(update={"zero": zero}) for zero in (0, 2, 3)]
    # Replicas with stage 1: test_unequal.py; with 2: test_zero_groups.py; with 3: masked-z3. With
    # split matrices and stage 3: olmo-hybrid; without ZeRO: bloom, gpt2. Stages without: isolated.
    both, whole = Strategy(dp=2, cp=2), Strategy(dp=1, cp=2, tp=2, sequence_parallel=False)
    # ZeRO shards over the parts of a sequence as over replicas, in each stage for itself.
    pipelines = [Strategy(dp=1, cp=2, pp=2, zero=3), Strategy(dp=1, cp=2, pp=2, vpp=2)]
    return [both, whole, *pipelines, Strategy(dp=1, cp=4)]


def _resident(model: ModelSpec, layout: Strategy, name: str = "") -> dict[str, Plan]:
    """All on the GPUs, for each replica a micro-batch of two sequences, without a name two."""
    layout = layout.model_copy(update={"micro_batch": 2})
    training = tiny_training((2 if name else 4) * layout.dp, clip_norm=0.5)
    placement = all_resident(build_graph(model, training, layout))
    return {f"{name_of(layout)}-{name}": plan_of(model, training, layout, placement)}


def _recomputed(recompute: Recompute) -> Placement:
    again = kind_placement(3).model_copy(update={"activations": {recompute: {Tier.HOST: 3}}})
    return placed(embedding=kind_placement(1), block=again, head=kind_placement(1))


def _random(ranks: int, number: int) -> dict[str, Plan]:
    """Any model and placement under any of the layouts, the same in every run."""
    found = drawn(sharded_plans(ranks, ("fp32",), "cpu", layouts(ranks)), number)
    return {f"random-{i}": plan for i, plan in enumerate(found)}


def _isolated(ranks: int, data: str) -> dict[str, Plan]:
    """Documents that are kept apart, in sequences that are split, beside every mixer."""
    found, training = {}, masked_training(4, data, clip_norm=0.5, isolate_documents=True)
    two = Strategy(dp=1, cp=2, micro_batch=2)
    others = {
        f"{MASKED}-isolated-tp": two.model_copy(update={"tp": 2}),
        "isolated-pp": two.model_copy(update={"pp": 2}),
    }
    for name, layout in ({f"{MASKED}-isolated": two} if ranks == 2 else others).items():
        model = tiny_model(**(GPT2 if ranks == 2 else EVERY_MIXER))
        placement = all_resident(build_graph(model, training, layout))
        found[name] = plan_of(model, training, layout, placement)
    return found


def _mixed() -> Plan:
    """Four ranks whose blocks have delta rules, wherever and recomputed anyhow."""
    split, training = Strategy(dp=1, cp=2, tp=2, micro_batch=2, zero=3), tiny_training(2)
    return anywhere(tiny_model(layers=3, **OLMO_HYBRID), training, split)


def plans(ranks: int, data: str) -> dict[str, Plan]:
    """By name: every layout, and with two ranks every family and whatever leaves the GPU."""
    found: dict[str, Plan] = {}
    for layout in layouts(ranks):
        blocks = 4 if layout.pp > 1 else 2
        found |= _resident(tiny_model(layers=blocks), layout)
    found |= _random(ranks, 2)
    model = tiny_model(layers=3)
    sharded = Strategy(dp=ranks // 2, cp=2, zero=3)
    masked = masked_training(4 * sharded.dp, data, clip_norm=0.5)
    found[f"{MASKED}-z3"] = plan_of(model, masked, sharded, placed_everywhere(3, SHORT))
    found |= _isolated(ranks, data)
    if ranks == 2:
        for name, changes in FAMILIES.items():
            found |= _resident(tiny_model(**changes), TWO, name)
        for recompute in (Recompute.MLP, Recompute.FULL):
            training = tiny_training(2, clip_norm=0.5)
            where = _recomputed(recompute)
            found[f"cp2-{recompute}"] = plan_of(model, training, TWO, where)
        found["cp2-bf16"] = plan_of(
            model, tiny_training(2, precision="bf16"), TWO, _recomputed(Recompute.NONE)
        )
    else:
        found |= _resident(tiny_model(**BLOOM), Strategy(dp=1, cp=2, tp=2), "bloom")
        found |= _resident(tiny_model(**GPT2), Strategy(dp=1, cp=2, tp=2), "gpt2")
        found["olmo-hybrid-tp2-z3"] = _mixed()
        few = tiny_model(kv_heads=1)
        found |= _resident(few, Strategy(dp=1, cp=4), "one-key")
    return found
