"""Coordinates of ranks and their groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigplan.content import Holds
from bigplan.graph.strategy import Replicas, Strategy
from bigplan.ranks import Coordinates, GroupName, channels, communicating, members, seat

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes)
def test_every_rank_has_its_coordinates(dp: int, cp: int, tp: int, pp: int) -> None:
    strategy = Strategy(dp=dp, cp=cp, tp=tp, pp=pp)
    every = [Coordinates.of(rank, strategy) for rank in range(strategy.ranks)]
    assert every == sorted(every)  # stages outermost, tensor-parallel ranks are neighbours
    assert [at.rank(strategy) for at in every] == list(range(strategy.ranks))
    assert set(every) == {
        Coordinates(s, d, t) for s in range(pp) for d in range(dp * cp) for t in range(tp)
    }


@given(sizes, sizes, sizes, sizes)
def test_groups_of_a_name_share_out_the_ranks(dp: int, cp: int, tp: int, pp: int) -> None:
    strategy = Strategy(dp=dp, cp=cp, tp=tp, pp=pp)
    every = [Coordinates.of(rank, strategy) for rank in range(strategy.ranks)]
    expected = {
        GroupName.ALL: dp * cp * tp * pp,
        GroupName.DATA: dp * cp,
        GroupName.CONTEXT: cp,
        GroupName.TENSOR: tp,
    }
    for name, size in expected.items():
        groups = {members(name, at, strategy) for at in every}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(strategy.ranks))
        for at in every:
            assert at.rank(strategy) in members(name, at, strategy)


def test_tensor_parallel_ranks_are_neighbours() -> None:
    strategy = Strategy(dp=2, tp=2, pp=2)
    at = Coordinates(stage=1, data=0, tensor=1)
    assert members(GroupName.TENSOR, at, strategy) == (4, 5)
    assert members(GroupName.DATA, at, strategy) == (5, 7)


def test_context_parallel_ranks_are_neighbours_of_one_replica() -> None:
    strategy = Strategy(dp=2, cp=2, tp=2)
    at = Coordinates(stage=0, data=3, tensor=1)
    assert members(GroupName.CONTEXT, at, strategy) == (5, 7)
    assert members(GroupName.DATA, at, strategy) == (1, 3, 5, 7)


def test_expert_parallel_ranks_are_neighbours_that_have_all_experts() -> None:
    strategy = Strategy(dp=6, pp=2, ep=3)
    at = Coordinates.of(10, strategy)
    assert at == (1, 4, 0)
    assert members(GroupName.EXPERT, at, strategy) == (9, 10, 11)
    assert members(GroupName.EXPERT_DATA, at, strategy) == (7, 10)


def test_zero_groups_are_neighbours_and_their_replicas_have_equal_parts() -> None:
    strategy = Strategy(dp=3, cp=2, pp=2, zero=3, zero_group=2)
    at = Coordinates.of(9, strategy)
    assert at == (1, 3, 0)
    assert members(GroupName.SHARD, at, strategy) == (8, 9)
    assert members(GroupName.REPLICA, at, strategy) == (7, 9, 11)


def test_a_zero_group_shares_out_its_own_copy_of_the_experts() -> None:
    """Two of four neighbours have the same half; ranks of both groups with equal parts, too."""
    strategy = Strategy(dp=8, ep=2, zero=3, zero_group=4)
    at = Coordinates.of(7, strategy)
    assert members(GroupName.EXPERT, at, strategy) == (6, 7)
    assert members(GroupName.EXPERT_DATA, at, strategy) == (5, 7)
    assert members(GroupName.REPLICA, at, strategy) == (3, 7)


def test_groups_of_one_rank_need_no_communicator() -> None:
    assert communicating(Strategy(dp=1)) == ()
    assert communicating(Strategy(dp=4)) == (GroupName.DATA,)
    assert communicating(Strategy(dp=4, ep=4)) == (GroupName.DATA, GroupName.EXPERT)
    spread = (GroupName.DATA, GroupName.EXPERT, GroupName.EXPERT_DATA)
    assert communicating(Strategy(dp=4, ep=2)) == spread
    hybrid = (GroupName.SHARD, GroupName.REPLICA)
    assert communicating(Strategy(dp=4, zero=2, zero_group=2)) == hybrid
    once = communicating(Strategy(dp=4, ep=2, zero=2, zero_group=2))
    assert once == (*hybrid, GroupName.EXPERT)  # a group has each expert on one rank
    twice = communicating(Strategy(dp=8, ep=2, zero=2, zero_group=4))
    assert twice == (*hybrid, GroupName.EXPERT, GroupName.EXPERT_DATA)


def test_messages_go_to_the_same_place_of_the_next_stage() -> None:
    found = list(channels(Strategy(dp=2, pp=3), lends_table=False))
    hidden = [(one.sender, one.receiver) for one in found if one.kind is Holds.HIDDEN]
    assert hidden == [(0, 2), (1, 3), (2, 4), (3, 5)]
    gradients = {(one.receiver, one.sender) for one in found if one.kind is not Holds.HIDDEN}
    assert gradients == set(hidden)


def test_chunks_of_virtual_stages_go_around() -> None:
    found = list(channels(Strategy(dp=1, pp=2, vpp=2), lends_table=False))
    assert [(one.sender, one.receiver) for one in found] == [(0, 1), (1, 0), (0, 1), (1, 0)]


def test_a_lent_table_goes_from_end_to_end_and_back() -> None:
    """To the rank at the same place of the last stage, whose part of the table it is."""
    strategy = Strategy(dp=1, tp=2, pp=3)
    without, found = (list(channels(strategy, lends_table=lends)) for lends in (False, True))
    assert found[: len(without)] == without
    ways = [(one.kind, one.sender, one.receiver) for one in found[len(without) :]]
    lent = [(Holds.PARAMETERS, 0, 4), (Holds.PARAMETERS, 1, 5)]
    assert ways == [*lent, (Holds.PARTIAL_GRADIENTS, 4, 0), (Holds.PARTIAL_GRADIENTS, 5, 1)]


def test_without_a_pipeline_there_are_no_messages() -> None:
    assert not list(channels(Strategy(dp=4), lends_table=False))


@given(st.lists(sizes, min_size=1, max_size=3), sizes, sizes, sizes)
def test_seats_of_a_group_lie_together(numbers: list[int], cp: int, tp: int, pp: int) -> None:
    """With groups of replicas of unlike sizes; without, a rank's seat is its number."""
    groups = [Replicas(number=number, micro_batch=n + 1) for n, number in enumerate(numbers)]
    alike = len(groups) == 1
    strategy = Strategy(
        dp=sum(numbers),
        cp=cp,
        tp=tp,
        pp=pp,
        micro_batch=len(groups),
        replicas=() if alike else tuple(groups),
    )
    seats = [seat(rank, strategy) for rank in range(strategy.ranks)]
    assert sorted(seats) == list(range(strategy.ranks))
    if alike:
        assert seats == sorted(seats)
    first = 0
    for number, group in enumerate(numbers):
        replica_of = {
            at: Coordinates.of(rank, strategy).data // cp for rank, at in enumerate(seats)
        }
        mine = replica_of[first], replica_of[first + group * cp * tp * pp - 1]
        assert [strategy.group_of(replica) for replica in mine] == [0 if alike else number] * 2
        # Stages outermost, then data-parallel places, as on nodes that are all alike.
        here = [rank for rank, at in enumerate(seats) if first <= at < first + group * cp * tp * pp]
        assert [seats[rank] for rank in here] == sorted(seats[rank] for rank in here)
        first += group * cp * tp * pp
