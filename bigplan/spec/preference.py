"""Training on preferences: pairs of responses to one prompt, of which one was chosen.

Direct preference optimisation (Rafailov et al., arXiv 2305.18290, equation 7). With the
log-probability of a whole response under the model (p) and under the model that training started
from (r), a pair's margin is

    m = beta * ((p_chosen - r_chosen) - (p_rejected - r_rejected))

and its loss -log sigmoid(m). With label smoothing e, the share of pairs that were told the wrong
way round (conservative DPO, Mitchell 2023), it is -(1 - e) log sigmoid(m) - e log sigmoid(-m).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bigplan.spec.files.document import Spec


class Preference(Spec):
    """What a step learns from pairs, as its data has them, in place of the next token."""

    method: Literal["dpo"]
    """direct preference optimisation"""
    beta: float = Field(default=0.1, gt=0)
    """what log-probabilities beside the starting model's count; larger: closer to that model"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """the share of pairs that are told the wrong way round"""
