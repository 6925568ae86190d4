"""A proof that nothing fits, which needs no solver's word: rows that contradict each other.

If every row holds, so does their sum, each row times a factor y (not negative for an inequality):

    sum over columns j of c_j x_j  <=  sum over rows i of y_i b_i,   c_j = sum_i y_i a_ij

With 0 <= x_j <= u_j the left side is at least the sum of u_j min(c_j, 0). If that is more than the
right side, nothing fits (Farkas' lemma). HiGHS gives the factors; whoever checks them need not
trust it. The sum is exact, and a row counts as kept where it is missed by less than solvers allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import inf, isfinite

from bigplan.solve.rows import Row

TOLERANCE = Fraction(1, 10**6)  # of each row; HiGHS and CBC call a row kept that is missed by 1e-7


def contradict(rows: Sequence[Row], factors: Iterable[float], upper: Mapping[str, float]) -> bool:
    """Whether the rows, each times its factor, show that no decisions meet them all.

    `upper`: of each column, infinite where there is none. Factors of inequalities below zero count
    as zero.
    """
    sums, missed = dict[str, Fraction](), Fraction(0)
    for row, factor in zip(rows, factors, strict=True):
        y = Fraction(factor if row.equal else max(factor, 0.0))
        if y and isfinite(row.limit):  # a limit that dwarfs its row's factors limits nothing
            missed -= y * Fraction(row.limit) + abs(y) * TOLERANCE
            for name, coefficient in row.terms.items():
                sums[name] = sums.get(name, Fraction(0)) + y * Fraction(coefficient)
    for name, each in sums.items():
        if each < 0:
            if upper[name] == inf:
                return False
            missed += each * Fraction(upper[name])
    return missed > 0
