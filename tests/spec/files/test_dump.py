import pytest

from bigplan.spec.catalog import find_cluster, find_model, list_clusters, list_models
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import numbers, to_yaml
from bigplan.spec.model import ModelSpec


@pytest.mark.parametrize("name", list_clusters())
def test_what_is_written_is_read_back(name: str) -> None:
    cluster = find_cluster(name)
    assert parse_document(to_yaml(cluster), Cluster) == cluster


@pytest.mark.parametrize("name", list_models())
def test_models_are_read_back_too(name: str) -> None:
    model = find_model(name)
    assert parse_document(to_yaml(model), ModelSpec) == model


def test_units_are_readable() -> None:
    text = to_yaml(find_cluster("h200-1x"))
    for line in ("memory: 139 GiB", "bf16: 989.4 TFLOP/s", "latency: 8 us", "adam_rate: 4.7 G/s"):
        assert line in text


def test_numbers_that_may_be_absent_have_units_too() -> None:
    pcie = find_cluster("h200-1x").group.pcie
    assert "both_ways: " not in to_yaml(pcie)
    both = pcie.replaced({"both_ways": 98e9}, {"both_ways": "measured"})
    assert "both_ways: 98 GB/s\n" in to_yaml(both)


def test_a_blocks_numbers_with_their_texts() -> None:
    found = numbers(find_cluster("h200-1x").group.gpu)
    assert found["memory_bandwidth"] == (4.8e12, "4.8 TB/s")
    assert found["peak_flops.fp32"] == (66.9e12, "66.9 TFLOP/s")
    assert found["attention_forward_efficiency.sdpa"][1] == "0.591"
    assert found["attention_backward_half_length.sdpa"] == (964.0, "964.0")
    assert {"name", "device", "gemm_efficiencies"}.isdisjoint(found)
