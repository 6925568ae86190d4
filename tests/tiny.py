"""A tiny model on a small two-device machine: plans in milliseconds, written by hand."""

from functools import cache
from pathlib import Path

from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.training import Training
from tests.effort import whole_searches

MIB = 2**20


def small_cluster(devices: int = 2) -> Cluster:
    """A CPU machine: no rate in it matters to the tests."""
    shipped = find_cluster("rtx-4090-workstation").group
    gpu = shipped.gpu.model_copy(
        update={
            "device": "cpu",
            "memory": 64 * MIB,
            "context_memory": 0,
            "peak_flops": {"bf16": 5e10, "fp32": 1e11},
        }
    )
    host = shipped.host.model_copy(update={"memory": 256 * MIB, "cores": devices})
    group: NodeGroup = shipped.model_copy(
        update={"gpus_per_node": devices, "gpu": gpu, "host": host}
    )
    return Cluster(name="small", node_groups=(group,))


def write_cluster(folder: Path, devices: int = 2) -> Path:
    """The small cluster as a file."""
    path = folder / "small.yaml"
    path.write_text(to_yaml(small_cluster(devices)))
    return path


@cache
def tiny_plan(devices: int = 2, engine: str = "native") -> Plan:
    """tiny-llama-test in fp32, three steps, devices that share out the samples."""
    training = Training(sequence_length=32, global_batch=4, precision="fp32", steps=3)
    model, cluster = find_model("tiny-llama-test"), small_cluster(devices)
    return make_plan(Request(model, training, cluster, {"dp": devices}, engine=engine))


@cache
def capped_plan(host: int = 256) -> Plan:
    """tiny-llama-demo on a device of 24 MiB: its blocks are in host memory of so many MiB."""
    training = Training(sequence_length=64, global_batch=4, precision="fp32", steps=2)
    cluster = small_cluster(1).with_caps(gpu=24 * MIB, host=host * MIB)
    with whole_searches():  # whichever test asks first
        return make_plan(Request(find_model("tiny-llama-demo"), training, cluster, engine="native"))
