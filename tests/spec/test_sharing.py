"""A node's rates and bytes, divided among the ranks that share it."""

from bigplan.spec.catalog import find_cluster
from bigplan.spec.sharing import NodeSharing
from bigplan.units import PerNode, PerRank

DGX = find_cluster("dgx-a100-80g").group


def test_rates_of_all_ranks_add_up_to_the_nodes() -> None:
    sharing = NodeSharing(8)
    assert sharing.rate_of_rank(PerNode(80.0)) == 10.0
    assert sharing.rate_of_node(PerRank(10.0)) == 80.0


def test_a_gpu_counts_its_own_bytes_and_a_node_those_of_all_its_ranks() -> None:
    sharing = NodeSharing(8)
    assert sharing.counted(5, "gpu") == 5
    assert sharing.counted(5, "node") == 40
    assert sharing.bytes_of_rank(47) == 5


def test_no_more_ranks_share_a_node_than_it_has_gpus() -> None:
    assert DGX.shared_by(3).ranks == 3
    assert DGX.shared_by(64).ranks == DGX.gpus_per_node


def test_drives_add_up_within_a_node() -> None:
    assert DGX.nvme is not None
    nvme = DGX.nvme.model_copy(update={"both_ways": 1e9, "endurance": 10**15})
    assert nvme.node_read == nvme.drives * nvme.read
    assert nvme.node_both_ways == nvme.drives * 1e9
    assert nvme.node_endurance == nvme.drives * 10**15
    without = DGX.nvme.model_copy(update={"both_ways": None, "endurance": None})
    assert without.node_both_ways is None
    assert without.node_endurance is None


def test_a_process_that_binds_nothing_gets_the_memory_of_one_numa_domain() -> None:
    host = DGX.host.model_copy(update={"memory_bandwidth": 300e9, "numa_domains": 2})
    assert host.domain_bandwidth == 150e9
