"""The chosen cover beside all covers, on small graphs; what may be one kernel and what not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bigplan.kernels.fusion.cover import CoverSearch, Members, best_cover, torch_cover
from bigplan.kernels.fusion.covered import uncovered
from bigplan.kernels.fusion.explain import explained
from bigplan.kernels.fusion.families import block_graph
from bigplan.kernels.fusion.graph import Arg, Argument, KernelGraph, KernelNode, dense, frozen
from bigplan.kernels.fusion.keep import AGAIN, best_plan, kept
from bigplan.kernels.fusion.price import Pricer
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import find_multiprocessor, list_multiprocessors

SHAPE = (4096, 2048)


def pricer(gpu: str = "h200-sxm") -> Pricer:
    return Pricer(find_gpu(gpu), find_multiprocessor(gpu))


def node(
    name: str, op: str, *, shape: tuple[int, ...] = SHAPE, **arguments: Argument
) -> KernelNode:
    refs = {k: Arg(v) if isinstance(v, str) else v for k, v in arguments.items()}
    refs = {("self" if k == "x" else k): v for k, v in refs.items()}
    return KernelNode(name, op, frozen(refs), (dense(name, shape, "bf16"),))


def graph(*nodes: KernelNode, outputs: tuple[str, ...], inputs: str = "ab") -> KernelGraph:
    return KernelGraph(tuple(dense(i, SHAPE, "bf16") for i in inputs), nodes, outputs, len(outputs))


def chain() -> KernelGraph:
    """An activation, a product that cannot be fused, and another activation, with a shortcut."""
    return graph(
        node("silu", "silu", x="a"),
        node("mul", "mul", x="silu", other="b"),
        node("mm", "mm", x="mul", mat2="c"),
        node("exp", "exp", x="mm"),
        node("add", "add", x="exp", other="mul"),
        node("sum", "sum", x="add", dim=(1,), keepdim=True, shape=(SHAPE[0], 1)),
        outputs=("add", "sum"),
        inputs="abc",
    )


def diamond() -> KernelGraph:
    """Two readers of one tensor, joined again, and one of another shape."""
    return graph(
        node("exp", "exp", x="a"),
        node("neg", "neg", x="exp"),
        node("tanh", "tanh", x="exp"),
        node("add", "add", x="neg", other="tanh"),
        node("other", "abs", x="b"),
        node("total", "sum", x="add", dim=(0,), shape=SHAPE[1:]),
        outputs=("add", "other", "total"),
    )


def softmaxes() -> KernelGraph:
    """Reductions that depend on each other, and a reader of both ends."""
    return graph(
        node("first", "_softmax", x="a", dim=-1, half_to_float=False),
        node("scaled", "mul", x="first", other="b"),
        node("second", "_softmax", x="scaled", dim=-1, half_to_float=False),
        node("both", "add", x="second", other="first"),
        outputs=("both",),
    )


def partitions(items: list[int]) -> Iterator[list[Members]]:
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [frozenset((first,)), *smaller]
        for i, group in enumerate(smaller):
            yield [*smaller[:i], group | {first}, *smaller[i + 1 :]]


def linked(search: CoverSearch, group: Members) -> bool:
    """Whether its nodes hang together by what they read from each other or from one tensor."""
    read = {i: {search.graph.base[ref] for ref in search.nodes[i].refs()} for i in group}
    known = {min(group)}
    while True:
        more = {
            i
            for i in group - known
            if any(
                read[i] & read[j] or i in search.before[j] or j in search.before[i] for j in known
            )
        }
        if not more:
            return known == set(group)
        known |= more


def cheapest(of: KernelGraph, prices: Pricer) -> float:
    """The least time of all covers there are, by groups that hang together."""
    search = CoverSearch(of, prices)
    best = float("inf")
    for groups in partitions(list(range(len(search.nodes)))):
        units = [search.unit(group) for group in groups]
        if any(unit is None for unit in units) or search.ordered(groups) is None:
            continue
        if all(search.convex(g) and linked(search, g) for g in groups):
            best = min(best, sum(unit.seconds for unit in units if unit))
    return best


@pytest.mark.parametrize("gpu", ["h200-sxm", "t4"])
@pytest.mark.parametrize("of", [chain(), diamond(), softmaxes()], ids=["chain", "diamond", "rows"])
def test_no_other_cover_is_faster(of: KernelGraph, gpu: str) -> None:
    prices = pricer(gpu)
    found = best_cover(of, prices)
    assert found.seconds == pytest.approx(cheapest(of, prices), rel=1e-9)
    assert found.seconds < torch_cover(of, prices).seconds
    assert sorted(n.name for u in found.units for n in u.members) == sorted(
        n.name for n in of.nodes
    )


def test_units_run_after_what_they_read() -> None:
    for of in (chain(), diamond(), softmaxes()):
        done: set[str] = {value.name for value in of.inputs}
        for unit in best_cover(of, pricer()).units:
            inside = {value.name for n in unit.members for value in n.outputs}
            assert {ref for n in unit.members for ref in n.refs()} - inside <= done
            done |= inside


def test_a_group_is_convex() -> None:
    search = CoverSearch(chain(), pricer())
    place = {n.name: i for i, n in enumerate(search.nodes)}
    assert search.convex(frozenset((place["silu"], place["mul"])))
    assert not search.convex(frozenset((place["mul"], place["add"])))  # mm and exp lie between


def _with_backward() -> KernelGraph:
    """y = exp(a) * b, read by a product; its gradient by b is exp(a) times the tangent."""
    ahead = (
        node("exp", "exp", x="a"),
        node("mul", "mul", x="exp", other="b"),
        node("mm", "mm", x="mul", mat2="c"),
    )
    back = (
        node("by_mul", "mm", x="tangents_1", mat2="c"),
        node("by_b", "mul", x="by_mul", other="exp"),
        node("by_c", "mm", x="mul", mat2="tangents_1"),
    )
    names = ("a", "b", "c", "tangents_1")
    inputs = tuple(dense(name, SHAPE, "bf16") for name in names)
    marked = tuple(replace(n, backward=True) for n in back)
    return KernelGraph(inputs, ahead + marked, ("mm", "by_b", "by_c"), 1)


def test_what_no_kernel_writes_anyway_is_computed_again() -> None:
    of = _with_backward()
    assert set(kept(of)) == {"c", "exp", "mul"}
    plan = best_plan(of, pricer())
    assert set(plan.kept) == {"c", "a", "mul"}
    (unit,) = (u for u in plan.cover.units if u.fused and u.members[0].backward)
    assert [n.name for n in unit.members] == [AGAIN + "exp", "by_b"]
    assert plan.kept_bytes == 2 * SHAPE[0] * SHAPE[1]


def test_where_bytes_have_a_price_fewer_are_kept() -> None:
    of = _with_backward()
    cheap, dear = best_plan(of, pricer()), best_plan(of, pricer(), price=2 / 25e9)
    assert dear.kept_bytes < cheap.kept_bytes
    assert dear.cover.seconds >= cheap.cover.seconds
    assert set(dear.kept) == {"a", "b", "c"}


def _norm_and_back(rows: int, columns: int) -> KernelGraph:
    """RMSNorm and its backward, as a GPU has them."""
    shape, vector, row = (rows, columns), (columns,), (rows, 1)
    inputs = (
        dense("x", shape, "bf16"),
        dense("w", vector, "bf16"),
        dense("tangents_1", shape, "bf16"),
    )
    norm: dict[str, Argument] = {"normalized_shape": vector, "weight": Arg("w")}
    ahead = KernelNode(
        "ahead", "_fused_rms_norm", frozen({"input": Arg("x"), "eps": 1e-5, **norm}),
        (dense("y", shape, "bf16"), dense("rstd", row, "fp32")),
    )  # fmt: skip
    given = {"grad_out": Arg("tangents_1"), "input": Arg("x"), "rstd": Arg("rstd")}
    back = KernelNode(
        "back", "_fused_rms_norm_backward",
        frozen({**given, "output_mask": (True, True), **norm}),
        (dense("by_x", shape, "bf16"), dense("by_w", vector, "bf16")), True,
    )  # fmt: skip
    return KernelGraph(inputs, (ahead, back), ("y", "by_x", "by_w"), 1)


def test_statistics_are_kept_and_no_norm_is_computed_again_for_them() -> None:
    plan = best_plan(_norm_and_back(512, 1024), pricer())
    assert set(plan.kept) == {"x", "w", "rstd"}
    assert [node.name for unit in plan.cover.units for node in unit.members] == ["ahead", "back"]


# Columns and what torch 2.11 took on an H200, in a CUDA graph, for 2^27 elements:
# benchmarks/results/2026-11-24-h200-generated/norms-back.jsonl.
BACKWARDS = ((64, 1512e-6), (256, 578e-6), (768, 415e-6), (4096, 436e-6), (16384, 503e-6))


@pytest.mark.parametrize(("columns", "measured"), BACKWARDS)
def test_torchs_norm_backward_is_priced_as_its_two_kernels(columns: int, measured: float) -> None:
    of = _norm_and_back(2**27 // columns, columns)
    assert pricer().torch(of, of.nodes[1]) == pytest.approx(measured, rel=0.15)
    (unit,) = (u for u in best_cover(of, pricer()).units if u.members[0].backward)
    assert unit.fused is not None
    assert unit.seconds < 0.6 * measured


DENSE = [
    name for name in list_models() if name.endswith(("b", "xl")) and not uncovered(find_model(name))
]


@pytest.mark.parametrize("name", DENSE[::9])
def test_blocks_of_shipped_models_gain_and_are_explained(name: str) -> None:
    prices = pricer()
    model = find_model(name)
    of = block_graph(model, 1, 2048, "bf16")
    plan = best_plan(of, prices)
    result = explained(plan, prices, "h200-sxm")
    assert 0 < result.seconds < result.apart
    assert any(line.generated for line in result.lines)
    assert all(edge.reason and edge.writer != edge.reader for edge in result.boundaries)
    parameters = {p.name for p in model.kinds()["block"] if p.name.endswith("norm.weight")}
    assert parameters <= {value.name for value in of.inputs}
    for line in result.lines:
        assert line.seconds > line.limit or not line.generated


@pytest.mark.parametrize("gpu", list_multiprocessors())
def test_every_gpu_has_a_cover(gpu: str) -> None:
    prices = pricer(gpu)
    of = block_graph(find_model("tiny-llama-test"), 8, 64, "fp16")
    plan = best_plan(of, prices)
    assert plan.cover.seconds < torch_cover(of, prices).seconds


def test_softmax_is_generated_as_torchs_moves_more() -> None:
    """On an H100 torch's took 1.2 to 2.9 times its bytes forward, and 2.0 to 2.3 backward."""
    of = graph(
        node("out", "_softmax", x="a", dim=-1, half_to_float=False),
        node("by_x", "_softmax_backward_data", grad_output="b", output="out", dim=-1),
        outputs=("out", "by_x"),
    )
    for one in of.nodes:
        moved = sum(of.values[name].nbytes for name in (*one.refs(), one.name))
        limit = moved / pricer().device.stream_rate
        assert 1.2 < pricer().torch(of, one) / limit < 2.3
    assert all(unit.fused is not None for unit in best_cover(of, pricer()).units)
