"""What ranks that have whole experts send each other, in the native runtime.

A token goes once to each rank that has any of its experts (runtime/experts/expert_parallel.py), and
what its experts there give is added up before it comes back. So of k copies of a token fewer
travel.
"""

from __future__ import annotations

from math import comb

from bigplan.graph.operators import Collective
from bigplan.graph.shape import RankShape

NUMBER = 4  # bytes of a weight, of an expert's number or of a place


def ranks_reached(shape: RankShape) -> float:
    """Ranks that a token is sent to, its own among them, expected of experts equally busy.

    A token has k experts anywhere among those of its groups: g of G groups of s experts. A rank
    that has the experts of w groups, of which j are the token's, has none of its experts with
    probability C(g s - j n, k) / C(g s, k), n being experts that it has of a group.
    """
    model, routing, here = shape.model, shape.model.routed_by, shape.experts
    each, groups, chosen = model.experts_per_token, routing.groups, routing.groups_per_token
    size = model.experts // groups
    if size % here and here % size:  # a part of some groups
        groups = chosen = 1
        size = model.experts
    whole, mine = max(1, here // size), min(here, size)
    among = chosen * size
    missed = sum(
        comb(whole, of_token)
        * comb(groups - whole, chosen - of_token)
        / comb(groups, chosen)
        * (comb(among - of_token * mine, each) / comb(among, each))
        for of_token in range(min(whole, chosen) + 1)
    )
    return shape.strategy.ep * (1 - missed)


def routed_hidden(shape: RankShape) -> int:
    """Bytes of what experts read of the tokens that a rank routes."""
    return shape.read_by_experts // (shape.tp if shape.dispatched else 1)


def came_bytes(shape: RankShape) -> int:
    """Bytes of tokens that come to a rank: as many as it sends, experts being equally busy."""
    return int(ranks_reached(shape) * routed_hidden(shape))


def brought(shape: RankShape) -> tuple[Collective, ...]:
    """Tokens to the ranks of their experts, with the weights of all their experts.

    In the backward tokens are gradients, and the weights' gradients go the other way.
    """
    weights = _numbers(shape)
    return (
        Collective("rows sent", "all_to_all", came_bytes(shape), rows=1),
        Collective("row weights", "all_to_all", weights, rows=1),
    )


def returned(shape: RankShape) -> tuple[Collective, ...]:
    """Of each token what its experts on a rank give, to the token's own rank."""
    return (Collective("rows returned", "all_to_all", came_bytes(shape), rows=1),)


def counted(shape: RankShape) -> tuple[Collective, ...]:
    """How many tokens come from each rank, for which the host waits, and their experts.

    An all-to-all of torch takes its sizes from the host. The backward has the forward's.
    """
    if not shape.spreads_experts:
        return ()
    return (
        Collective("rows counted", "all_to_all", 8 * shape.strategy.ep, rows=1, waits=True),
        Collective("row choices", "all_to_all", _numbers(shape), rows=1),
    )


def places_bytes(shape: RankShape) -> int:
    """Bytes of where tokens and rows lie on both sides, unless the whole layer runs again.

    That is the experts of each token that came, a place of each row here, and of each of this
    rank's tokens a place of each of its rows and of each copy that is sent.
    """
    if not shape.spreads_experts:
        return 0
    sent = int(NUMBER * shape.tokens * ranks_reached(shape))
    return _numbers(shape) + sent + 2 * NUMBER * shape.tokens * shape.model.experts_per_token


def _numbers(shape: RankShape) -> int:
    """Bytes of a number for each expert of each token that comes."""
    each = NUMBER * shape.model.experts_per_token
    return int(each * shape.tokens * ranks_reached(shape))
