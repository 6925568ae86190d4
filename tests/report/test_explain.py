import json

from bigplan.report.explain import explain, explain_json, explain_report
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
    found = explain(planned("resident"))
    assert explain_json(found)["hidden_from"] is None
    assert "than every transfer" not in shown(explain_report(found))


def test_matrix_products_show_tensor_cores_and_waste() -> None:
    text = shown(explain_report(explain(planned("resident"))))
    line = next(line for line in text.splitlines() if "mlp down by weight" in line)
    assert " yes " in line
    assert line.count("%") == 4  # of peak, tile, wave, lost


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words() -> None:
    found = explain(planned("resident"))
    text = shown(explain_report(found, 80), width=80).split("Updates and moves")[0]
    assert "attention residual" in text
    assert "…" not in text
    assert "of peak  " not in text
    assert "of peak  " in shown(explain_report(found, 120), width=120)
