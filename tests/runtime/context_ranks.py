"""Plans of ranks that split sequences, for the processes of sharded_ranks to run."""

from __future__ import annotations

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from tests.runtime.plans import plan_of, tiny_model, tiny_training
from tests.runtime.sharded_ranks import GPT2, all_resident, name_of


def plans(ranks: int) -> dict[str, Plan]:
    """By name."""
    layout = Strategy(dp=1, cp=2)
    found = {}
    for name, model in (("llama", tiny_model()), ("gpt2", tiny_model(**GPT2))):
        training = tiny_training(2)
        placement = all_resident(build_graph(model, training, layout))
        found[f"{name_of(layout)}-{name}"] = plan_of(model, training, layout, placement)
    return found
