"""`bigplan profile`: measure this machine, write it as a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.interrupts import unwound
from bigplan.cli.spread import takes
from bigplan.errors import InputError, RefusedError
from bigplan.paths import exists, is_dir, is_file
from bigplan.system import require_linux
from bigplan.targets import CLUSTER, require_target

if TYPE_CHECKING:
    from bigplan.profile.machine import ProbeDone, Profile, Wish
    from bigplan.spec.cluster import Cluster


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure, for how long, and where to write it."""

    quick: Annotated[
        bool, typer.Option("--quick", help="One minute (default: up to five, more repetitions).")
    ] = False
    out: Annotated[
        Path, typer.Option("--out", help="Write the cluster here; only a cluster is replaced.")
    ] = Path("cluster.yaml")
    nvme: Annotated[
        Path | None,
        typer.Option(
            "--nvme",
            help="Folder on the drive that tensors may go to (default: that of the cluster in "
            "--out, else none). A file of up to 4 GiB is written there, and removed.",
        ),
    ] = None
    name: Annotated[str, typer.Option("--name", help="Name of the cluster.")] = "this-machine"
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            "--cpu-devices",
            min=1,
            help="Measure so many devices that share cores and memory (default: the GPUs, or one "
            "of these).",
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Measure all nodes of the Ray cluster there, side by side, and collectives "
            "across them. Every node needs bigplan with the extra `launch`.",
        ),
    ] = None
    interface: Annotated[
        str | None,
        typer.Option(
            "--interface",
            help="Network interface on which the nodes' processes listen for each other, such as "
            "eth0; with --address.",
        ),
    ] = None
    multiprocessors: Annotated[
        Path | None,
        typer.Option(
            "--multiprocessors",
            help="Measure nothing but the GPU's multiprocessors, for the model of generated "
            "kernels, and write their description here.",
        ),
    ] = None
    as_json: AsJson = False


@takes(ProfileOptions)
def profile(options: ProfileOptions) -> None:
    """Measure this machine and write it as a cluster YAML for `bigplan plan --cluster FILE`.

    Keep the machine idle meanwhile. What is not measured stays as the shipped description of the
    GPU type has it; every number says where it is from.
    """
    require_linux("profile")
    if find_spec("torch") is None:
        raise RefusedError(
            "profiling needs torch, which is not installed; run: pip install 'bigplan[launch]'"
        )
    console = Console(stderr=options.as_json)
    if options.multiprocessors is not None:
        _multiprocessors(options.multiprocessors, console, as_json=options.as_json)
        return
    out, nvme, known = options.out, options.nvme, _known(options.out)
    if nvme is None and known is not None:
        nvme = _drive_of(known)
    if options.interface is not None and options.address is None:
        raise InputError("--interface is of nodes of a Ray cluster: name that with --address")
    if options.address is None and nvme is not None and not is_dir(nvme):
        raise InputError(f"--nvme {nvme} is no folder; name one on the drive to measure")
    wish = _wish(options.quick, nvme, options.name, options.cpu_devices)
    if options.address is not None:
        found, cluster = _survey(options.address, options.interface, wish, console)
    else:
        found, cluster = _measure(wish, console)
    _write_cluster(cluster, out)
    if options.as_json:
        print_json(_told(found, cluster, out))
        return
    _show(found, console)
    told = f"Cluster written to {out}; plan with it: bigplan plan --cluster {out} --model NAME"
    console.print(told, highlight=False)


def _multiprocessors(out: Path, console: Console, *, as_json: bool) -> None:
    """Write the figures of this machine's first GPU, and print them beside the shipped ones."""
    import torch

    from bigplan.spec.files.document import write_text
    from bigplan.spec.files.dump import to_yaml

    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise RefusedError(
            "multiprocessors are measured by Triton's kernels on a CUDA GPU, and there is none "
            "here, or no Triton: pip install 'bigplan[kernels]'"
        )
    if exists(out):
        raise InputError(f"{out} is there already; name a new file")
    from bigplan.profile.multiprocessor import measure_multiprocessor

    known, found = measure_multiprocessor(torch.device("cuda", 0))
    write_text(out, to_yaml(found), "multiprocessors")
    if as_json:
        print_json({"multiprocessors": found.model_dump(), "written": str(out)})
        return
    for name in type(found).model_fields:
        before, after = getattr(known, name), getattr(found, name)
        if before != after and name != "sources":
            console.print(f"{name:16s} {before:.4g} -> {after:.4g}", highlight=False)
    console.print(f"Written to {out}", highlight=False)


def _known(out: Path) -> Cluster | None:
    """The cluster file to be replaced; no other kind of file is. Raises InputError."""
    from bigplan.spec.cluster import Cluster
    from bigplan.spec.files.document import load_document

    require_target("--out", out, CLUSTER)
    return load_document(out, Cluster) if is_file(out) and out.stat().st_size else None


def _drive_of(known: Cluster) -> Path | None:
    drives = known.node_groups[0].nvme
    return Path(drives.path).expanduser() if drives and drives.path else None


def _wish(quick: bool, folder: Path | None, name: str, cpu_devices: int | None) -> Wish:
    with Console(stderr=True).status("Starting torch"):
        from bigplan.profile.machine import QUICK_SECONDS, THOROUGH_SECONDS, Wish

    seconds = QUICK_SECONDS if quick else THOROUGH_SECONDS
    resolved = folder.resolve() if folder is not None else None
    return Wish(name, resolved, cpu_devices, seconds)


def _survey(
    address: str, interface: str | None, wish: Wish, console: Console
) -> tuple[Sequence[Profile], Cluster]:
    from bigplan.launcher.session import ray_session, require_packages
    from bigplan.launcher.survey import survey

    require_packages()

    def tell(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with ray_session(address, 0, cuda=False):
        found = survey(wish, interface, tell)
    for note in found.notes:
        tell(f"Note: {note}")
    return found.profiles, found.cluster


def _measure(wish: Wish, console: Console) -> tuple[Sequence[Profile], Cluster]:
    from bigplan.profile.machine import profile_machine
    from bigplan.report.profile_report import progress_line

    def tell(step: ProbeDone) -> None:
        line = progress_line(step.before, step.after)
        console.print(f"{step.name:20s} {step.seconds:5.1f} s  {line}", highlight=False)

    def warn(text: str) -> None:
        Console(stderr=True).print(f"warning: {text}", highlight=False)

    with unwound():
        found = profile_machine(wish, tell, warn)
    return (found,), found.after


def _show(profiles: Sequence[Profile], console: Console) -> None:
    from bigplan.report.profile_report import profile_report

    for profile in profiles:
        console.print(profile_report(profile.before.group, profile.after.group))


def _told(profiles: Sequence[Profile], cluster: Cluster, out: Path) -> dict[str, object]:
    """The cluster and, for every node, measured figures as text beside the known ones."""
    from bigplan.report.profile_report import figures

    measured = [[asdict(f) for f in figures(p.before.group, p.after.group)] for p in profiles]
    return {"cluster": cluster.model_dump(), "measured": measured, "written": str(out)}


def _write_cluster(cluster: Cluster, out: Path) -> None:
    from bigplan.spec.files.document import write_text
    from bigplan.spec.files.dump import to_yaml

    write_text(out, to_yaml(cluster), "cluster")
