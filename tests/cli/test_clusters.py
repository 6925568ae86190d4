"""`bigplan clusters`."""

import json
from pathlib import Path

from bigplan.spec.catalog import find_cluster, list_clusters
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.gpu import find_gpu
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
    shown = bigplan("clusters", tmp_path / "mine.yaml")[1]
    assert [line.partition(" #")[0] for line in shown.splitlines()] == text.splitlines()


def test_a_copy_says_where_a_name_can_stand(bigplan: Run, tmp_path: Path) -> None:
    """`gpu: NAME` of the shipped file is written out, so that nothing else would tell of it."""
    copy = bigplan("clusters", "dgx-h100")[1]
    for key, name in (
        ("gpu", "h100-sxm-80gb"),
        ("intra_node", "nvlink4"),
        ("inter_node", "infiniband-ndr-8x400"),
    ):
        section = f"  {key}: # {name}, as shipped; `{key}: NAME` in place of this section"
        assert section in copy
    before, _, after = copy.partition("  gpu: #")
    after = after[after.index("  host:") :]
    (tmp_path / "mine.yaml").write_text(f"{before}  gpu: rtx-4090\n{after}")
    assert find_cluster(str(tmp_path / "mine.yaml")).group.gpu == find_gpu("rtx-4090")
    own = copy.replace("NVIDIA H100 80GB HBM3", "another")
    (tmp_path / "mine.yaml").write_text(own)
    assert "  gpu:\n" in bigplan("clusters", tmp_path / "mine.yaml")[1]


def test_an_unknown_cluster(bigplan: Run) -> None:
    code, out, err = bigplan("clusters", "t4")
    assert (code, out) == (2, "")
    assert "no cluster is called 't4'; did you mean 't4-cloud'?" in err
