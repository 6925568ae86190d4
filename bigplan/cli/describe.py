"""Descriptions: this machine, and the schema of an experiment."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.system import require_linux
from bigplan.targets import CLUSTER, require_target

if TYPE_CHECKING:
    from bigplan.spec.cluster import Cluster


def detect(
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            "--cpu-devices",
            help="Make so many devices that share cores and memory (default: the GPUs, or one of "
            "these).",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where tensors may go on disk (default: here)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write here, not to stdout; only a cluster is replaced.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe this machine as a cluster YAML; measures for a few seconds.

    Rates of GPUs and their links are as shipped; `bigplan profile` measures them.
    """
    from bigplan.spec.detect.cluster import detect as detect_machine
    from bigplan.spec.detect.machine import available_cores, load_told
    from bigplan.spec.files.document import write_text
    from bigplan.spec.files.dump import to_yaml

    require_linux("detect")
    if out is not None:
        require_target("--out", out, CLUSTER)
    busy = load_told(available_cores())  # before this process is
    found = detect_machine(cpu_devices, folder)
    if busy:
        print(f"warning: {busy}", file=sys.stderr)
    cluster = _with_own_rates(found)
    text = to_yaml(cluster)
    if out is not None:
        write_text(out, text, "cluster")
    if as_json:
        print_json({"cluster": cluster.model_dump(mode="json")})
    elif out is None:
        print(text, end="")
    else:
        print(f"Cluster written to {out}")


def _with_own_rates(cluster: Cluster) -> Cluster:
    """Of CPU devices those of the torch that will train here, where there is one.

    numpy's products may be several times off. All devices compute at once there.
    """
    if cluster.group.gpu.device != "cpu" or find_spec("torch") is None:
        return cluster
    from bigplan.profile.machine import measure_cpu_devices

    return measure_cpu_devices(cluster)


def schema() -> None:
    """Print the JSON Schema of an experiment file, `sweep` and `find` included."""
    from bigplan.spec.files.json_schema import json_schema
    from bigplan.spec.sweep import Study

    print(json.dumps(json_schema(Study), indent=2))
