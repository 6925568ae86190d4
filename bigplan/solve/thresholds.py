"""What decides where a search stops caring, each with its physical cause."""

# Of a step, or of a memory: what rounding to whole rows, pages and chunks adds, and by what
# simulated steps of plans differ that are equal to the integer program.
NOISE = 1e-3

# Of a step: simulations and measured steps of one plan differ by as much from run to run on one
# machine, so plans are told apart no further, and bounds are raised no further.
WITHIN = 0.01

# Of moves' seconds, those that a step is longer by, though lanes overlap: copies wait for a free
# entry of their ring, and for each other on the link. Simulations come to a tenth to a fifth. It
# also ranks strategies: of 22 plans for one to eight GPUs, half of it gave slower ones in seven, by
# 9% at most, and faster ones in four, by 1.7% at most.
EXPOSED = 0.2

# Strategies simulated, or neighbours of a plan, in a row without progress before it counts as the
# best: what comes next is drawn from the same, so it seldom is better.
PATIENCE = 6
