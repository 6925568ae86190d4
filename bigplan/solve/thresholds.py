"""Differences and delays below which a search stops caring, each with its physical cause.

Other constants of the search decide nothing about a plan's merit. Budgets bound its time
(`search.CERTIFIED`, `search.DOUBTED`, `improve.BUDGETS`, `improve.SMALL`, `improve.VARIED`,
`improve.DRAWN`, `improve.SEVERAL`, `shortage.TRIED`).
Shares say how moves are drawn (`moves`). Tolerances are for rounding, in layers (`linear.EXACT`,
`legality.EXACT`). `candidate.REACHED` is measured, `formulation.DRIVES` seen in simulations.
"""

from math import inf

# A share of a step or of a memory. Rounding to whole rows, pages and chunks adds this much, and
# plans that the integer program takes for equal differ this much in simulations.
NOISE = 1e-3

# A share of a step. Measured steps of one plan differ this much from each other and from the
# simulation, from run to run on one machine. So a search neither tells plans apart more finely nor
# raises bounds further.
WITHIN = 0.01

# The share of moves' seconds by which a step becomes longer, although lanes overlap. Copies wait
# for a free entry of their ring, and for each other on the link. Simulations show a tenth to a
# fifth. The share also ranks strategies and neighbours. Half of it made 16 of 106 plans for one to
# eight GPUs faster, by 3.3% at most, and 9 slower, by 2.6% at most, for a sixth more CPU time
# (benchmarks/search_surcharge.py); one of four small models missed a plan 6% faster.
EXPOSED = 0.2

# A share of a step. Plans that are further behind the best are not improved: better overlap would
# have to bring them to the front. At EXPOSED in its place one of 27 plans changed (by 0.02%), and
# 70B on four DGX took a third more CPU time.
NEAR = 0.05

# Strategies, or neighbours of a plan, that are simulated in a row without progress before the best
# so far counts as the best. Later ones are drawn from the same set, so they seldom are better.
PATIENCE = 6


def patience(expected: float, best: float) -> float:
    """Idle strategies in a row after which a strategy with this estimate is not tried.

    Plans are seldom faster than their estimates by more than WITHIN: none was of 95 simulated for
    17 cases, and one since by 2.4%. So where the next estimate is further above the best plan, one
    more strategy is enough, for a runner-up to name. When every estimate above the best plan ended
    the search, 13B on two RTX 4090 missed its fastest strategy, by 3.4%, at an estimate 0.3% above;
    33 other plans stay, in as much CPU time (search_compare.py).
    A strategy whose estimate is below the best plan by more than half of what moves usually add is
    always tried. With slow networks that gives plans 3 to 16% faster in 4 cases of 54
    (search_patience.py).
    """
    if expected >= best * (1 + WITHIN):
        return 1
    return PATIENCE if expected * (1 + EXPOSED / 2) >= best else inf
