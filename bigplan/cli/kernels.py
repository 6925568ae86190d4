"""`bigplan kernels`: which fused kernels a model would have, and how fast they are here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.completion import known_models
from bigplan.cli.spread import takes
from bigplan.errors import InputError, quoted

if TYPE_CHECKING:
    from bigplan.kernels.fusion.explain import GraphExplanation
    from bigplan.kernels.fusion.keep import KeepPlan

kernels = typer.Typer(no_args_is_help=True, help="Fused GPU kernels, chosen by a model.")
PRECISIONS = ("bf16", "fp16", "fp32")
MOST_TOKENS = 10**8


@dataclass(frozen=True)
class ExplainOptions:
    """What to explain, and for which machine."""

    gpu: Annotated[str, typer.Option(help="A shipped GPU type with its multiprocessors.")] = (
        "h200-sxm"
    )
    micro_batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence (default: the model's, at most 8192).")
    ] = None
    precision: Annotated[str, typer.Option(metavar="|".join(PRECISIONS))] = "bf16"
    keep_at: Annotated[
        str | None,
        typer.Option(
            help="What a byte kept for the backward costs: the bandwidth of a link it would "
            "leave and come back by, such as '50 GB/s'. Default: nothing.",
        ),
    ] = None
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile each kernel for that GPU, which need not be here: registers and spills.",
        ),
    ] = False
    source: Annotated[bool, typer.Option("--source", help="Print the Triton source, too.")] = False
    as_json: AsJson = False


@kernels.command()
@takes(ExplainOptions)
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="Shipped name, model YAML or config.json; or package.module:function, which "
            "gives (an nn.Module, its example inputs) and needs torch.",
            autocompletion=known_models,
        ),
    ],
    options: ExplainOptions,
) -> None:
    """The kernels of a block, forward and backward: what each fuses and why, and what it takes."""
    from bigplan.kernels.fusion.explain import explained
    from bigplan.kernels.fusion.price import Pricer
    from bigplan.spec.gpu import find_gpu
    from bigplan.spec.multiprocessor import find_multiprocessor

    sm = find_multiprocessor(options.gpu)
    pricer = Pricer(find_gpu(options.gpu), sm)
    found = _planned(model, options, pricer)
    result = explained(found, pricer, options.gpu)
    made = _compiled(found, sm.capability) if options.compiles else {}
    if options.as_json:
        print_json(result.to_json() | ({"compiled": made} if made else {}))
        return
    _show(result)
    for number, one in made.items():
        print(
            f"kernel {number}: {one['registers']} registers a thread "
            f"({one['estimated']} estimated), {one['spilled']} bytes spilled, "
            f"{one['shared']} bytes of shared memory"
        )
    if options.source:
        _sources(found)


def _planned(model: str, options: ExplainOptions, pricer: object) -> KeepPlan:
    from bigplan.kernels.fusion.covered import uncovered
    from bigplan.kernels.fusion.families import block_graph
    from bigplan.kernels.fusion.keep import best_plan
    from bigplan.kernels.fusion.price import Pricer
    from bigplan.spec.catalog import find_model, looks_like_path

    assert isinstance(pricer, Pricer)
    price = _price(options.keep_at)
    if ":" in model and not looks_like_path(model):
        return _of_module(model, options.gpu, price)
    found = find_model(model)
    if parts := uncovered(found):
        raise InputError(
            f"{found.name} has {' and '.join(parts)}, which kernels are not chosen for; name "
            "another model"
        )
    length = options.seq_len
    if length is None:
        length = min(8192, found.max_sequence_length)
    for name, value in (("--micro-batch", options.micro_batch), ("--seq-len", length)):
        if value < 1 or options.micro_batch * length > MOST_TOKENS:
            raise InputError(
                f"{name} is {quoted(value)}; sequences times tokens are between 1 and "
                f"{MOST_TOKENS:,}: write {'more' if value < 1 else 'fewer'}"
            )
    if options.precision not in PRECISIONS:
        raise InputError(
            f"--precision is {quoted(options.precision)}; kernels are generated for "
            f"{', '.join(PRECISIONS)}: use one of them"
        )
    graph = block_graph(found, options.micro_batch, length, options.precision)
    return best_plan(graph, pricer, price)


def _price(link: str | None) -> float:
    """Seconds for a byte to leave by a link and come back."""
    from bigplan.units import parse_bandwidth

    if link is None:
        return 0.0
    rate = parse_bandwidth(link)
    if not rate:
        raise InputError("--keep-at is 0; a link has a bandwidth, such as '50 GB/s'")
    return 2 / rate


def _of_module(path: str, gpu: str, price: float) -> KeepPlan:
    from importlib.util import find_spec

    from bigplan.importing import named

    if find_spec("torch") is None:
        raise InputError(f"{quoted(path)} needs torch: pip install 'bigplan[launch]'")
    from bigplan.kernels.optimised import optimise

    try:
        module, examples = named(path)()
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise InputError(
            f"{quoted(path)} gives no (module, examples): {problem}; write package.module:function "
            "of a function without arguments that returns both"
        ) from problem
    plan: KeepPlan = optimise(module, examples, gpu=gpu, price=price).kernels.plans[0]
    return plan


def _show(result: GraphExplanation) -> None:
    from rich.console import Console
    from rich.table import Table

    from bigplan.units import format_bytes

    console = Console()
    table = Table(title=f"Kernels of a block on {result.gpu}", title_justify="left")
    for name in ("", "us", "apart", "at best", "moves"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bound by", "operators and tile"):
        table.add_column(name, overflow="fold")
    side = ""
    for line in result.lines:
        if line.side != side:
            side = line.side
            table.add_section()
            table.add_row("", "", "", "", "", "", f"[bold]{side}")
        again = f" (again: {', '.join(line.again)})" if line.again else ""
        tile = f"\n[dim]{line.kernel}" if line.generated else ""
        table.add_row(
            str(line.number), f"{line.seconds * 1e6:.1f}", f"{line.apart * 1e6:.1f}",
            f"{line.limit * 1e6:.1f}", format_bytes(round(line.nbytes)),
            line.bound if line.generated else "", " + ".join(line.operators) + again + tile,
        )  # fmt: skip
    console.print(table)
    console.print(
        "us: predicted; apart: as torch's operators one by one; at best: its bytes at the memory's "
        "nominal bandwidth."
    )
    made = sum(line.generated for line in result.lines)
    console.print(
        f"{made} generated kernels; {result.seconds * 1e3:.3f} ms predicted, "
        f"{result.apart * 1e3:.3f} ms operator by operator; "
        f"{format_bytes(result.kept_bytes)} kept for the backward."
    )
    reasons = Table(title="Why they are apart", title_justify="left")
    for name in ("from", "to", "bytes", "reason"):
        reasons.add_column(name, overflow="fold")
    for edge in result.boundaries:
        size = format_bytes(edge.nbytes)
        reasons.add_row(str(edge.writer), str(edge.reader), size, edge.reason)
    console.print(reasons)
    for operator, reason in result.left:
        console.print(f"torch runs {operator}: {reason}", highlight=False)


def _compiled(plan: KeepPlan, capability: str) -> dict[int, dict[str, int]]:
    """The compiler's figures for a GPU, by the kernel's number."""
    from dataclasses import asdict
    from importlib.util import find_spec

    if find_spec("triton") is None or find_spec("torch") is None:
        raise InputError("--compile needs torch and Triton: pip install 'bigplan[launch,kernels]'")
    from bigplan.kernels.compiled import compile_for

    return {
        number: asdict(compile_for(unit.fused.body, unit.fused.tile, capability))
        | {"estimated": unit.fused.time.registers}
        for number, unit in enumerate(plan.cover.units, 1)
        if unit.fused is not None
    }


def _sources(plan: KeepPlan) -> None:
    from bigplan.kernels.fusion.source import source

    for number, unit in enumerate(plan.cover.units, 1):
        if unit.fused is not None:
            print(f"\n# kernel {number}: {unit.name}")
            print(source(unit.fused.body, unit.fused.tile))


@kernels.command()
def bench(
    part: Annotated[
        str | None, typer.Option(help="Run this part only; see --list.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Append every measurement to this file, a JSON line each.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Tiny sizes, anywhere: times mean nothing.")
    ] = False,
    tune: Annotated[
        int,
        typer.Option(
            help="Time the model's best so many tiles of each kernel once, and keep the fastest."
        ),
    ] = 0,
    listed: Annotated[bool, typer.Option("--list", help="List the parts and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure generated kernels beside predictions, the byte limit and every baseline here."""
    from importlib.util import find_spec

    from rich.console import Console

    if find_spec("torch") is None:
        raise InputError("kernels are measured with torch: pip install 'bigplan[launch]'")
    from bigplan.kernels.benchmark import bench as measuring

    if listed:
        if as_json:
            print_json({"parts": measuring.PARTS})
            return
        for name, about in measuring.PARTS.items():
            print(f"{name:12s} {about}")
        return
    console = Console(stderr=as_json)
    console = console if console.is_terminal else Console(stderr=as_json, width=160)
    records = measuring.run(part, out, console, rehearse=rehearse, tune=tune)
    if as_json:
        print_json({"records": records})
