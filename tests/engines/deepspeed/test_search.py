"""What DeepSpeed can place: every way is legal, pins hold, and what does not fit says how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bigplan.engines import make_plan
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.engines.deepspeed.sizes import PARTS, sizes_of
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.toys import toy_graph

GIB = 2**30
ONE = find_cluster("h200-1x")
EIGHT = find_cluster("hgx-h200")


Settings = Mapping[str, str | int | float]


def request(
    settings: Settings | None = None,
    *,
    model: str = "llama-like-5.5b",
    gpus: int = 1,
    gpu_gib: int | None = None,
    host_gib: int | None = None,
    **training: str | int,
) -> Request:
    wanted = {"sequence_length": 4096, "global_batch": 16, **training}
    cluster = ONE if gpus == 1 else EIGHT
    cluster = cluster.with_caps(
        gpu=gpu_gib * GIB if gpu_gib else None, host=host_gib * GIB if host_gib else None
    )
    found = Training.model_validate(wanted)
    return Request(find_model(model), found, cluster, settings or {}, engine="deepspeed")


def ways(asked: Request) -> list[Decisions]:
    return list(DeepSpeedSearch(asked)._ways())


def test_every_way_is_one_that_deepspeed_takes() -> None:
    for gpus in (1, 8):
        found = ways(request(gpus=gpus, gradient_precision="bf16"))
        assert {way.stage for way in found} == {0, 1, 2, 3}
        for way in found:
            assert not list(way.problems())
            assert way.strategy.tp == way.strategy.vpp == way.strategy.accumulation_group == 1
            assert way.strategy.pp == 1 or way.stage < 2
            assert way.strategy.zero == (way.stage if way.strategy.dp > 1 else 0)


def test_what_deepspeed_refuses_is_no_way() -> None:
    strategy = Strategy(dp=1)
    for way, words in (
        (Decisions(strategy, 2, parameters=Tier.HOST), "need ZeRO stage 3, not 2"),
        (Decisions(strategy, 2, state=Tier.NVME), "NVMe needs ZeRO stage 3"),
        (Decisions(strategy, 0, state=Tier.HOST), "needs ZeRO stage 1, 2 or 3"),
        (Decisions(strategy, 3, parameters=Tier.HOST), "state off the GPU as well"),
        (Decisions(strategy, 2, state=Tier.HOST, on_cpu=0.5), "needs ZeRO stage 3 and host"),
    ):
        assert words in "; ".join(way.problems())


def test_gradients_are_summed_as_asked_for_or_not_at_all() -> None:
    """ZeRO 1 and 2 sum in 16 bits on the CPU: open where nothing is summed, or that is wanted."""
    wide, narrow = ways(request()), ways(request(gradient_precision="bf16"))
    on_cpu = [way for way in wide if way.state is not Tier.GPU and way.stage < 3]
    assert {way.strategy.micro_batch for way in on_cpu} == {16}
    assert {way.strategy.micro_batch for way in narrow if way.stage == 2} > {1, 2, 4, 8}
    assert any(way.strategy.micro_batch == 4 and way.stage == 3 for way in wide)


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        ({"zero": 3, "parameters": "host"}, lambda way: way.parameters is Tier.HOST),
        ({"optimizer": "nvme"}, lambda way: way.state is Tier.NVME and way.stage == 3),
        ({"recompute": "full", "micro_batch": 2}, lambda way: way.recompute),
        ({"zero": 3, "optimizer.host": 0.4}, lambda way: way.state is Tier.HOST),
    ],
)
def test_what_the_user_sets_holds(settings: Settings, holds: object) -> None:
    assert callable(holds)
    found = ways(request(settings))
    assert found
    assert all(map(holds, found))


def test_the_share_that_the_user_sets_is_in_the_configuration() -> None:
    found = make_plan(request({"zero": 3, "optimizer.host": 0.4, "micro_batch": 4}))
    assert found.config["json"]["zero_optimization"]["offload_optimizer"]["ratio"] == 0.4
    # Only whole groups stay on the GPU, of a fortieth of the state and up to one parameter more.
    block = found.placement.stages[0].kinds["block"]
    assert 0.4 <= block.optimizer[Tier.HOST] / block.layers < 0.45


def test_whole_groups_of_state_stay_on_the_gpu() -> None:
    sizes = sizes_of(toy_graph(blocks=3), ONE.group, Tier.HOST, partly=True)
    sizes = replace(sizes, sub_group=50, parts=((40, 40, 60, 30), (5, 5)))
    assert sizes.groups == (80, 60, 30, 10)
    resident = [sizes.resident(share) for share in (1.0, 0.76, 0.75, 0.5, 0.1)]
    assert resident == [0, 0, 80, 140, 170]


def test_decisions_that_are_not_open_are_told() -> None:
    for key, value in (("slots", 2), ("block.parameters", "host"), ("streamed", 0.5)):
        with pytest.raises(InputError, match="what is open with --engine deepspeed"):
            DeepSpeedSearch(request({key: value}))
    with pytest.raises(InputError, match="no way in which DeepSpeed runs"):
        make_plan(request({"micro_batch": 3}))


def test_a_little_gpu_makes_it_offload_and_recompute() -> None:
    ample, capped = (
        make_plan(request(gradient_precision="bf16")),
        make_plan(request(gpu_gib=24, gradient_precision="bf16")),
    )
    assert Decisions.of(ample).state is Tier.GPU
    found = Decisions.of(capped)
    assert found.state is Tier.HOST
    assert found.recompute
    activations = capped.placement.stages[0].kinds["block"].activations
    assert activations == {Recompute.FULL: {Tier.GPU: 24}}
    assert capped.predicted.step_seconds > ample.predicted.step_seconds
    assert_within(capped)


def assert_within(plan: Plan) -> None:
    for use in plan.predicted.memory:
        assert use.used_bytes <= use.capacity_bytes
        assert use.used_bytes == sum(use.by_purpose.values())


def test_more_gpu_memory_is_never_slower() -> None:
    steps = [
        make_plan(request(gpu_gib=gib, gradient_precision="bf16")).predicted.step_seconds
        for gib in (20, 24, 48, 130)
    ]
    assert steps == sorted(steps, reverse=True)


def tried_one_by_one(search: DeepSpeedSearch, way: Decisions) -> Decisions:
    """What `_fitted` finds, found the long way: every share, every chunk, every stage."""
    found = way
    shares = [i / PARTS for i in range(1, PARTS)] if way.on_cpu < 1.0 else [1.0]
    for share in shares:
        for chunk in reversed(search._chunks(way.strategy)):
            found = replace(way, on_cpu=share, loss_chunk=chunk)
            memory = search.tried(found).memory
            if all(use.used_bytes <= use.capacity_bytes for use in memory):
                return found
    return found


@pytest.mark.parametrize("gpus", [1, 8])
def test_halving_what_is_left_finds_what_trying_all_does(gpus: int) -> None:
    shares, chunks, fits = set[float](), set[int](), set[bool]()
    for gpu_gib, host_gib in ((12, None), (24, None), (40, 70), (70, 50), (None, None)):
        asked = request(gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, gradient_precision="bf16")
        search = DeepSpeedSearch(asked)
        for way in search._ways():
            found = search._fitted(way)
            assert found.decisions == tried_one_by_one(search, way)
            shares.add(found.decisions.on_cpu)
            chunks.add(found.decisions.loss_chunk)
            fits.add(not found.short)
    assert len(shares) > 4
    assert len(chunks) > 3
    assert fits == {True, False}


def test_what_is_short_is_so_of_the_fullest_stage() -> None:
    """Also where the first stage has fewer blocks than the second."""
    search = DeepSpeedSearch(request(gpus=8, gpu_gib=12, gradient_precision="bf16"))
    piped, later = 0, 0
    for way in search._ways():
        tried = search.tried(way)
        missing: dict[Tier, list[int]] = {}
        for use in tried.memory:
            missing.setdefault(use.tier, []).append(use.used_bytes - use.capacity_bytes)
        assert tried.short == {tier: max(of) for tier, of in missing.items() if max(of) > 0}
        piped += way.strategy.pp > 2
        later += max(missing[Tier.GPU]) > missing[Tier.GPU][0]
    assert piped
    assert later


def test_what_does_not_fit_says_what_is_short() -> None:
    with pytest.raises(InfeasibleError, match="does not fit with DeepSpeed") as caught:
        make_plan(request(model="llama-3-405b"))
    assert caught.value.bytes_short > 0
    assert "gpu memory per GPU short" in str(caught.value)


def test_equal_requests_give_equal_plans_that_read_back(tmp_path: object) -> None:
    one, other = make_plan(request(gpu_gib=24)), make_plan(request(gpu_gib=24))
    assert one == other
    assert DeepSpeedSearch(request(gpu_gib=24)).tried(Decisions.of(one)).decisions == Decisions.of(
        one
    )
