"""A cluster with other parts."""

import pytest

from bigplan.errors import InputError
from bigplan.spec.catalog import find_cluster, find_gpu
from bigplan.spec.experiment import make_experiment
from bigplan.spec.hardware import with_hardware

PLAIN = {"model": "tiny-llama-test", "cluster": "rtx-4090-workstation"}


def test_a_figure_and_its_source() -> None:
    nvme = with_hardware(find_cluster("rtx-4090-workstation"), {"nvme.drives": 4}).group.nvme
    assert nvme is not None
    assert nvme.drives == 4
    assert nvme.sources["drives"].startswith("estimate: 4 as stated, in place of: estimate: one")


def test_sizes_have_units_and_parts_names() -> None:
    changes = {"hardware.host.memory": "128 GiB", "hardware.gpu": "h200-sxm"}
    experiment = make_experiment({**PLAIN, **changes})
    group = experiment.cluster_spec().group
    assert group.host.memory == 128 * 2**30
    assert group.gpu == find_gpu("h200-sxm")


def test_words_and_figures_as_they_are_need_no_source() -> None:
    usual = find_cluster("rtx-4090-workstation")
    nvme = with_hardware(usual, {"nvme.path": "/fast", "nvme.drives": 1}).group.nvme
    assert nvme is not None
    assert usual.group.nvme is not None
    assert (nvme.path, nvme.sources) == ("/fast", usual.group.nvme.sources)


def test_an_entry_of_a_figure_that_has_several() -> None:
    usual = find_cluster("h200-1x")
    changes = {"gpu.peak_flops.bf16": "1.5 PFLOP/s", "gpu.peak_flops.fp8": "3 PFLOP/s"}
    gpu = with_hardware(usual, changes).group.gpu
    before = usual.group.gpu.peak_flops
    assert gpu.peak_flops == before | {"bf16": 1.5e15, "fp8": 3e15}
    assert (
        "as stated, in place of: " + usual.group.gpu.sources["peak_flops"]
        in (gpu.sources["peak_flops"])
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_figure_of_a_new_part(order: int) -> None:
    """Whatever the order, the figure is the new part's, and the part is not the old one's."""
    changes = {"gpu": "rtx-3090", "gpu.memory": "11.6 GiB"}
    changed = dict(list(changes.items())[::order])
    gpu = with_hardware(find_cluster("rtx-4090-workstation"), changed).group.gpu
    assert gpu.memory == int(11.6 * 2**30)
    assert gpu.name == find_gpu("rtx-3090").name
    assert gpu.sources["memory"].endswith(find_gpu("rtx-3090").sources["memory"])


def test_caps_and_nodes_apply_to_the_changed_cluster() -> None:
    experiment = make_experiment(
        {**PLAIN, "cluster": "dgx-h100", "nodes": 2, "hardware.nvme.drives": 2, "caps.nvme": "1 TB"}
    )
    group = experiment.cluster_spec().group
    assert (group.nodes, group.nvme and group.nvme.drives) == (2, 2)
    assert group.nvme is not None
    assert group.nvme.capacity == 5 * 10**11


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("nvme.drive", 4, "'nvme.drive' is no key of a node; did you mean 'nvme.drives'"),
        ("gpu.peak_flops", 1e15, r"no key of a node; did you mean 'gpu\.peak_flops\."),
        ("nodes", 4, "write `nodes` beside `hardware`"),
        ("gpu", "h300", "no GPU type is called 'h300'"),
        ("nvme.drives", 0, r"nvme\.drives` is 0, which must be greater than 0"),
        ("host.memory", 128, r"host\.memory` is 128 B, which no machine has"),
        ("inter_node.latency", "1 us", "inter_node: .* has none whose figures could change"),
    ],
)
def test_mistakes(key: str, value: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_experiment({**PLAIN, f"hardware.{key}": value}).cluster_spec()
