"""Products of experts in 8 bits on one GPU: products and casts alone, beside those in bf16.

    python -m benchmarks.eight_bits_experts OUT [PART ...]

Parts: a shipped model's name (by default three, one after the other): with its experts and 16,384
tokens, milliseconds and TFLOP/s of a product forward, by input and by weight, in bf16, in 8 bits
and in 8 bits with casts; the relative error of each against fp32; GB/s of casts by what they move.
`mixtral-like-3b` and `qwen3-like-2b`: steps of these models of benchmarks/experts.py in bf16 and in
8 bits, beside their promises. A part that fails says so in a line. OUT gets
eight_bits_experts.json. Half a minute on an H200, and half for steps. Without a GPU: nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from benchmarks.experts import MODELS as STEPPED_MODELS
from benchmarks.limit_run import Amount, tell, trained
from benchmarks.parts import CUDA, Asked, milliseconds
from bigplan.engines import make_plan
from bigplan.kernels.handwritten import expert_casts, rows
from bigplan.planner import Request
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.grouped import EXPERTS_AS_STORED, Grouped
from bigplan.runtime.experts.grouped_eight_bits import VALUES, EightBitExperts, Ends, multiplied
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")
TOKENS = 16384
STEPS = 6
STEPPED = {model.name: model for model in STEPPED_MODELS}
LOOKED_AT = 2  # experts whose results are compared


class Case(NamedTuple):
    """Rows of random tokens, and one matrix of all experts."""

    rows: Tensor
    gradient: Tensor
    weight: Tensor
    ends: Tensor
    total: Tensor

    @classmethod
    def of(cls, model: ModelSpec) -> Case:
        """As a trained router spreads them: evenly."""
        count, each, made = model.experts, model.experts_per_token, torch.Generator("cuda")
        scores = torch.randn(TOKENS, count, device="cuda", generator=made.manual_seed(0))
        _, places = experts.route(scores, each, normalised=True)
        weight = _make(model.ffn * count, model.hidden)
        total = torch.zeros(weight.shape, device="cuda")
        both = (_make(TOKENS * each, width) for width in (model.hidden, model.ffn))
        return cls(*both, weight, places.ends(count), total)


def _make(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1


def _attempts(name: str, works: dict[str, Callable[[], float]]) -> dict[str, float]:
    found = {}
    for one, work in works.items():
        try:
            found[f"{name} {one}"] = work()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            print(f"  {name} {one} FAILED: {str(error).splitlines()[0][:160]}", flush=True)
    return found


def _exactly(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """As `multiplied`, with all sums in fp32."""
    (a, by_a), (b, by_b) = left, right
    return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]
        a, b, by_a, ScalingType.RowWise, by_b, ScalingType.RowWise, offs=ends
    )


def _products(case: Case) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Each direction in bf16, in 8 bits alone by either sum, and in 8 bits with its casts."""
    ends, weight, count = case.ends, case.weight, len(case.ends)
    low = EightBitExperts(expert_casts.by_row, expert_casts.by_column)
    for name, x, leads in (
        ("forward", case.rows, "entering"),
        ("by input", case.gradient, "leaving"),
    ):
        values, scales = torch.empty_like(x, dtype=VALUES), x.new_empty(1, len(x)).float()
        expert_casts.by_row(x, values, scales)
        if leads == "leaving":
            small, by = expert_casts.by_column(weight, count)
            right = small.transpose(1, 2), by
        else:
            small = torch.empty_like(weight, dtype=VALUES)
            by = weight.new_empty(count, len(weight) // count, dtype=torch.float32)
            expert_casts.by_row(weight, small, by)
            right = experts.entering(small, count), by
        ours, theirs = (getattr(one, leads) for one in (low, EXPERTS_AS_STORED))
        yield (
            name,
            {
                "bf16": partial(theirs, x, weight, ends),
                "fast": partial(multiplied, (values, scales[0]), right, ends),
                "exact": partial(_exactly, (values, scales[0]), right, ends),
                "cast": lambda ours=ours, x=x: ours(low.read(x), weight, ends),
            },
        )
    yield "by weight", _by_weight(case, low)


def _by_weight(case: Case, low: EightBitExperts) -> dict[str, Callable[[], object]]:
    ends = case.ends
    given, turned = (low.read_again(one, ends) for one in (case.gradient, case.rows))
    pairs = (given.values, given.scales), (turned.values.T, turned.scales)

    def added(by: Grouped) -> Tensor:
        factors = case.gradient, by.read_again(case.rows, ends)
        by.add(case.total, fresh=True, factors=factors, ends=ends, by=rows.put)
        return experts.leaving(case.total, len(ends))

    return {
        "bf16": lambda: F.grouped_mm(case.gradient.T, case.rows, offs=ends),
        "fast": partial(multiplied, *pairs, turned.ends.turned),
        "exact": partial(_exactly, *pairs, turned.ends.turned),
        "bf16 added": lambda: added(EXPERTS_AS_STORED),
        "cast added": lambda: added(low),
    }


def _error(case: Case, name: str, found: Tensor) -> float:
    """Relative, in the root of mean squares, of a few experts' results against fp32."""
    lost = whole = 0.0
    for expert, mine in list(experts.slices(case.ends))[:LOOKED_AT]:
        matrix = experts.leaving(case.weight, len(case.ends))[expert].float()
        x, gradient = case.rows[mine].float(), case.gradient[mine].float()
        exact = {"forward": x @ matrix.T, "by input": gradient @ matrix}
        exact["by weight"] = gradient.T @ x
        ours = found[expert] if name == "by weight" else found[mine]
        lost += float((ours.float() - exact[name]).square().sum())
        whole += float(exact[name].square().sum())
    return (lost / whole) ** 0.5


def products(model: ModelSpec) -> dict[str, float]:
    """Milliseconds, TFLOP/s and errors of a product in each direction."""
    case, found = Case.of(model), {}
    flops = 2e-9 * case.rows.numel() * model.ffn
    for name, works in _products(case):
        took = _attempts(name, {one: partial(milliseconds, work) for one, work in works.items()})
        errors = _attempts(
            f"{name} error",
            {one: lambda w=work, n=name: _error(case, n, w()) for one, work in works.items()},
        )
        told = [f"{n.removeprefix(name):11} {v:7.3f} {flops / v:5.0f}" for n, v in took.items()]
        lost = [f"{value:.2g}" for value in errors.values()]
        print(f"  {name:10}{' |'.join(told)}  errors {' '.join(lost)}", flush=True)
        found |= took | errors
    return found


def casts(model: ModelSpec) -> dict[str, float]:
    """GB/s by the bytes that casts move."""
    case, count = Case.of(model), model.experts
    small, by = torch.empty_like(case.weight, dtype=VALUES), case.total.new_empty(count, model.ffn)
    low = EightBitExperts(expert_casts.by_row, expert_casts.by_column)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "weight by row": (
            3 * case.weight.numel(),
            partial(expert_casts.by_row, case.weight, small, by),
        ),
        "weight by column": (
            5 * case.weight.numel(),
            partial(expert_casts.by_column, case.weight, count),
        ),
        "rows by row": (3 * case.rows.numel(), partial(low.read, case.rows)),
        "inner by row": (3 * case.gradient.numel(), partial(low.read, case.gradient)),
        "rows by column": (5 * case.rows.numel(), partial(low.read_again, case.rows, case.ends)),
        "inner by column": (
            5 * case.gradient.numel(),
            partial(low.read_again, case.gradient, case.ends),
        ),
        "ends": (0, partial(Ends.of, case.ends, len(case.rows))),
    }
    took = _attempts("ms", {n: partial(milliseconds, work) for n, (_, work) in works.items()})
    rates = [f"{n[3:]} {v:.3f} {works[n[3:]][0] / v / 1e6:.0f}" for n, v in took.items()]
    print(f"  casts, ms and GB/s: {' | '.join(rates)}", flush=True)
    return took


def steps(model: ModelSpec, asked: Asked) -> dict[str, Any]:
    """Steps in bf16 and in 8 bits by the runtime's worker, beside their promises."""
    found, cluster = {}, asked.cluster()
    for low in (False, True):
        training = Training(
            sequence_length=2048, global_batch=16, precision="bf16", fp8_gemms=low, clip_norm=1.0
        )
        plan = make_plan(Request(model, training, cluster, engine="native"))
        promised = plan.predicted.model_dump(mode="json")
        promised["memory"] = {str(use.tier): use.used_bytes for use in plan.predicted.memory}
        with trained(plan, asked.out, Amount(STEPS)) as (_, record):
            tell(f"{model.name} fp8 {low}", promised, record)
        found[f"fp8 {low}"] = record | {"promised": plan.predicted.step_seconds}
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measure what is asked for, model by model."""
    asked = Asked.of(__doc__, "eight_bits_experts", MODELS)
    if not CUDA:
        sys.exit("no GPU: nothing to measure")
    found: dict[str, Any] = {}
    for name in asked.parts:
        print(name, flush=True)
        if name in STEPPED:
            found[name] = steps(STEPPED[name], asked)
            continue
        model = find_model(name)
        found[name] = products(model) | casts(model)
        torch.cuda.empty_cache()
    (asked.out / "eight_bits_experts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
