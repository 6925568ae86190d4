"""The format of matrices in 4 bits: NormalFloat codes in blocks with a scale (QLoRA).

Dettmers et al. 2023 (arXiv 2305.14314): 64 elements of a row are divided by their largest
magnitude, and each becomes the nearest of 16 levels that are equally probable in a normal
distribution. Their codes and then their scale are stored in elements of the compute dtype, so that
a layer of such matrices is a flat buffer like any other, which ranks may cut anywhere. An element
of b bytes holds 2 b codes, the first in its lowest bits. Scales are not quantised again: in 16 bits
a parameter takes 4.25 (QLoRA's 4.13).
"""

from bigplan.spec.expert_steps import ROUTER
from bigplan.spec.layers import SHARED_GATE
from bigplan.spec.step import Parameter

BLOCK = 64  # elements of a row that share a scale
# Appendix E of the paper.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def is_packed(parameter: Parameter) -> bool:
    """Whether a block's parameter is stored so: matrices, but a router's or a shared gate's.

    Those have few elements, and a router's errors would choose other experts. Nor are the biases of
    all experts, which are a matrix too.
    """
    matrix = len(parameter.shape) == 2 and not parameter.constant and not parameter.filters
    matrix = matrix and not parameter.name.endswith(".bias")
    return matrix and parameter.name not in (ROUTER, SHARED_GATE)


def packed_columns(columns: int, element: int) -> int:
    """Stored elements of so many bytes in a row of `columns`, which divide by BLOCK."""
    return columns // BLOCK * (BLOCK // (2 * element) + 1)
