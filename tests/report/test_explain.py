import json

import pytest

from bigplan.cost.compute import MISALIGNED_ALONE
from bigplan.planner import Request, make_plan
from bigplan.report.explain import advice_lines, explain, explain_json, explain_report, moves_table
from bigplan.report.operators import OperatorRow
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.report.shown import shown
from tests.report.test_operators import planned


def test_the_terminal_and_the_json_say_the_same() -> None:
    found = explain(planned("offloaded"))
    data = json.loads(json.dumps(explain_json(found)))
    text = shown(explain_report(found))
    assert len(data["operators"]) == len(found.rows)
    for row in data["operators"]:
        assert row["seconds"] == 0 or row["name"] in text
        assert row["seconds"] == 0 or row["bound"] in text.replace("network", "communication")
    assert f"{data['efficiency']['mfu']:.1%}" in text
    assert f"Bound by: {data['bound_by']}." in text
    assert max(data["critical_path"], key=data["critical_path"].get) in data["bound_by"]
    assert "nvidia-smi would show" in text
    assert data["hidden_from"]["tokens"] > 0
    assert data["hidden_from"]["lane"] in text
    for advice in data["advice"]:
        assert advice["text"] in " ".join(text.split())


def test_a_plan_that_moves_nothing_says_nothing_of_transfers() -> None:
    training = Training(sequence_length=256, global_batch=16)
    request = Request(find_model("tiny-llama-demo"), training, find_cluster("h200-1x"))
    found = explain(make_plan(request))
    assert explain_json(found)["hidden_from"] is None
    assert "than every update and move" not in shown(explain_report(found))


def test_the_network_is_one_of_the_moves_that_compute_hides() -> None:
    """Gathered parameters and reduced gradients, whatever the batch; a pipeline is told nothing."""
    found = explain(planned("sharded"))
    assert found.hidden_from is not None
    lane, tokens = found.hidden_from
    assert lane == "data-parallel network"
    network = sum(row.seconds for row in found.rows if row.where == lane)
    compute = sum(row.seconds for row in found.rows if row.of_layers)
    assert tokens == pytest.approx(found.tokens_per_step * network / compute)
    assert "(data-parallel network takes longest)" in " ".join(advice_lines(found))
    assert explain(planned("pipeline")).hidden_from is None


def test_matrix_products_show_tensor_cores_and_waste() -> None:
    text = shown(explain_report(explain(planned("resident"))))
    line = next(line for line in text.splitlines() if "mlp down by weight" in line)
    assert " yes " in line
    assert line.count("%") == 4  # of peak, tile, wave, lost


def test_a_vocabulary_that_loads_narrowly_is_slow_on_tensor_cores_not_without_them() -> None:
    """Its price is a part of the tensor cores' rate (`MISALIGNED_ALONE`)."""
    model = find_model("llama-like-3.3b").model_copy(update={"vocab": 50257})
    cluster = find_cluster("h200-1x")
    training = Training(sequence_length=1024, global_batch=16)
    found = explain(make_plan(Request(model, training, cluster)))
    heads = [row for row in found.rows if row.where == "head" and row.flops]
    assert {(row.tensor_cores, row.alignment) for row in heads} == {(True, MISALIGNED_ALONE[1])}
    text = " ".join(shown(explain_report(found)).split())
    assert "lm head by input" in text
    assert " slow " in text
    assert "without tensor cores" not in text
    share = sum(row.seconds for row in heads)
    every = sum(row.seconds for row in found.rows if row.tensor_cores is not None)
    assert f"{share / every:.1%} of the products' time is on tensor cores that wait" in text


def test_products_at_the_power_limit_are_told_with_what_it_costs() -> None:
    training = Training(sequence_length=8192, global_batch=2)
    cluster = find_cluster("h200-1x")
    pins = {"micro_batch": 2}
    found = explain(make_plan(Request(find_model("llama-like-3.3b"), training, cluster, pins)))
    limited = [row for row in found.rows if row.bound == "power"]
    assert {(row.lost, row.of_peak) for row in limited} == {(0, cluster.group.gpu.gemm_power_limit)}
    products = sum(row.seconds for row in found.rows if row.tensor_cores is not None)
    lost = sum(row.seconds * (row.power_lost or 0) for row in limited) / products
    text = " ".join(shown(explain_report(found)).split())
    assert f"{lost:.1%} of the products' time is lost to the GPU's power limit" in text
    assert f"power {found.efficiency.by_bound['power']:.0%}" in text
    small = shown(explain_report(explain(planned("resident"))))
    assert "power limit" not in " ".join(small.split())


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words() -> None:
    found = explain(planned("resident"))
    text = shown(explain_report(found, 80), width=80).split("Updates and moves")[0]
    assert "attention residual" in text
    assert "…" not in text
    assert "of peak  " not in text
    assert "of peak  " in shown(explain_report(found, 120), width=120)


def test_names_of_actions_are_whole_on_a_narrow_terminal() -> None:
    rows = [
        OperatorRow("device to host", "micro-batch", name, 4335, 39.9, 0.0, 998e9, "transfer")
        for name in ("accumulate", "tensor_reduce")
    ]
    text = shown(moves_table(rows), width=80)
    assert "accumulate" in text
    assert "tensor_reduce" in text
