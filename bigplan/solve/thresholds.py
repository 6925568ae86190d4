"""Differences and delays below which a search stops caring, each with its physical cause."""

# A share of a step or of a memory. Rounding to whole rows, pages and chunks adds this much, and
# plans that the integer program takes for equal differ this much in simulations.
NOISE = 1e-3

# A share of a step. Measured steps of one plan differ this much from each other and from the
# simulation, from run to run on one machine. So a search neither tells plans apart more finely nor
# raises bounds further.
WITHIN = 0.01

# The share of moves' seconds by which a step becomes longer, although lanes overlap. Copies wait
# for a free entry of their ring, and for each other on the link. Simulations show a tenth to a
# fifth. The share also ranks strategies. Half of it made 7 of 22 plans for one to eight GPUs
# slower, by 9% at most, and 4 of them faster, by 1.7% at most.
EXPOSED = 0.2

# Strategies, or neighbours of a plan, that are simulated in a row without progress before the best
# so far counts as the best. Later ones are drawn from the same set, so they seldom are better.
PATIENCE = 6
