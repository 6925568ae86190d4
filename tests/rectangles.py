"""Random rectangles of a model's parameter."""

from __future__ import annotations

from hypothesis import strategies as st

from bigplan.rectangle import Rectangle, all_of
from bigplan.spec.step import Parameter


@st.composite
def parts_of(draw: st.DrawFn, parameter: Parameter) -> Rectangle:
    """Any of its rectangles."""
    whole = all_of(parameter)
    first_row, first_column = (draw(st.integers(0, n - 1)) for n in (whole.rows, whole.columns))
    last_row = draw(st.integers(first_row + 1, whole.rows))
    last_column = draw(st.integers(first_column + 1, whole.columns))
    return Rectangle(parameter.name, first_row, last_row, first_column, last_column)
