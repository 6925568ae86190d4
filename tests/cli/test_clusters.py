"""`bigplan clusters`."""

import json
from pathlib import Path

from bigplan.spec.catalog import find_cluster, list_clusters
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from tests.cli.conftest import Run


def test_the_list_has_every_shipped_cluster(bigplan: Run) -> None:
    code, out, _ = bigplan("clusters")
    assert code == 0
    rows = {
        line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()
    }
    assert rows.keys() >= set(list_clusters())
    assert rows["dgx-a100-40g"] == (
        "8 x NVIDIA A100-SXM4-40GB 39 GiB 900 GiB 4 x 3.18 TiB InfiniBand HDR, 8 x 200 Gb/s"
    )
    assert rows["rtx-3090x4-workstation"].endswith("235 GiB 2 x 1.64 TiB one node only")
    assert " none " in rows["v100-4x"]


def test_the_list_as_json(bigplan: Run) -> None:
    rows = {row["name"]: row for row in json.loads(bigplan("clusters", "--json")[1])["clusters"]}
    assert tuple(rows) == list_clusters()
    assert rows["t4-cloud"]["gpu"] == "Tesla T4"
    assert rows["rtx-3090x4-workstation"]["nvme"] == 3_600_000_000_000
    assert rows["rtx-3090x4-workstation"]["network"] is None


def test_one_cluster_stands_alone_with_its_sources(bigplan: Run) -> None:
    code, out, _ = bigplan("clusters", "hgx-h200")
    assert code == 0
    assert "peak_flops: NVIDIA H200 datasheet, SXM" in out  # from the shipped GPU type
    assert parse_document(out, Cluster) == find_cluster("hgx-h200")


def test_one_cluster_as_json(bigplan: Run) -> None:
    shown = json.loads(bigplan("clusters", "h200-1x", "--json")[1])
    assert Cluster.model_validate(shown["cluster"]) == find_cluster("h200-1x")


def test_a_file_is_shown_as_well(bigplan: Run, tmp_path: Path) -> None:
    text = to_yaml(find_cluster("l4-cloud")).replace("name: l4-cloud", "name: mine", 1)
    (tmp_path / "mine.yaml").write_text(text)
    assert bigplan("clusters", tmp_path / "mine.yaml")[1] == text


def test_an_unknown_cluster(bigplan: Run) -> None:
    code, out, err = bigplan("clusters", "t4")
    assert (code, out) == (2, "")
    assert "no cluster is called 't4'; did you mean 't4-cloud'?" in err
