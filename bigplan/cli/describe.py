"""Descriptions: this machine, what is shipped, and the schema of an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bigplan.errors import InputError


def detect(
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            "--cpu-devices",
            help="Make so many devices of cores and memory (default: the GPUs, or one of these).",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where tensors may go on disk (default: here)."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write here, not to stdout.")] = None,
) -> None:
    """Describe this machine as a cluster YAML; measures for a few seconds."""
    from bigplan.spec.detect import detect as detect_machine
    from bigplan.spec.dump import to_yaml

    text = to_yaml(detect_machine(cpu_devices, folder))
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write the cluster to {out}: {error.strerror}") from None
    print(f"Cluster written to {out}")


def models() -> None:
    """List the shipped models."""
    from bigplan.spec.catalog import find_model, list_models
    from bigplan.units import format_count

    for name in list_models():
        model = find_model(name)
        print(
            f"{name:24}{format_count(model.parameter_count):>8} parameters, {model.layers} layers"
        )


def clusters() -> None:
    """List the shipped clusters."""
    from bigplan.spec.catalog import find_cluster, list_clusters

    for name in list_clusters():
        print(f"{name:24}{find_cluster(name).description}")


def schema() -> None:
    """Print the JSON Schema of an experiment file."""
    from bigplan.spec.experiment import json_schema

    print(json.dumps(json_schema(), indent=2))
