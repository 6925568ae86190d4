from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_cluster, find_model, list_clusters, list_models
from bigplan.spec.multiprocessor import find_multiprocessor

_ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_file_is_listed_loads_and_bears_its_name() -> None:
    assert set(list_models()) >= {
        "llama-3-8b",
        "llama-3-70b",
        "gpt2-xl",
        "gpt3-175b",
        "tiny-llama-test",
        "tiny-llama-demo",
    }
    assert list_clusters() == (
        "a100-8x-cloud",
        "a10g-cloud",
        "dgx-a100-40g",
        "dgx-a100-80g",
        "dgx-h100",
        "dgx2-v100",
        "gb200-nvl72",
        "gh200-4x",
        "h200-1x",
        "hgx-b200",
        "hgx-b300",
        "hgx-h200",
        "l4-cloud",
        "l40s-8x",
        "mi300x-8x",
        "rtx-3090x4-workstation",
        "rtx-4090-workstation",
        "rtx-4090x2-workstation",
        "rtx-5090-workstation",
        "rtx-a6000x4-workstation",
        "rtx-pro-6000x8-server",
        "t4-cloud",
        "v100-4x",
    )
    assert [find_model(name).name for name in list_models()] == list(list_models())
    assert [find_cluster(name).name for name in list_clusters()] == list(list_clusters())


def test_a_path_is_read() -> None:
    path = _ROOT / "bigplan" / "models" / "llama-3-8b.yaml"
    assert find_model(str(path)) == find_model("llama-3-8b")
    path = _ROOT / "cluster_configs" / "h200-1x.yaml"
    assert find_cluster(str(path)) == find_cluster("h200-1x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lama3-8b",
            "no model is called 'lama3-8b'; did you mean 'llama-3-8b'? (shipped: bloom-176b",
        ),
        ("zzz", "no model is called 'zzz' (shipped: "),
        ("", "no model is called ''"),
        ("models/x.yaml", "model 'models/x.yaml': no such file; check the path (seen from "),
    ],
)
def test_unknown_model(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_model(name)
    assert message in str(caught.value)


def test_unknown_cluster() -> None:
    with pytest.raises(InputError, match="no cluster is called 'dgx-h10'; did you mean 'dgx-h100'"):
        find_cluster("dgx-h10")


def test_the_beginning_of_a_name_is_meant_before_one_that_looks_alike() -> None:
    with pytest.raises(InputError, match="did you mean 'h200-sxm'"):
        find_multiprocessor("h200")


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(InputError, match="is a folder"):
        find_cluster(str(tmp_path))
