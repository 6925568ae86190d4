"""Training on preferences: pairs of responses to one prompt, of which one was chosen.

The loss of a pair is -log sigmoid(m) of its margin m. With label smoothing e, the share of pairs
that were told the wrong way round (Mitchell 2023), it is -(1 - e) log sigmoid(m) - e log
sigmoid(-m). Margins are of log-probabilities of whole responses under the model:

    dpo     m = beta ((p_chosen - r_chosen) - (p_rejected - r_rejected)), where r are those under
            the model that training started from (Rafailov et al., arXiv 2305.18290, equation 7)
    simpo   m = beta (a_chosen - a_rejected) - gamma, where a is p over the response's tokens, a
            mean (Meng et al., arXiv 2405.14734, equation 6)
    orpo    m = o_chosen - o_rejected, where o = a - log(1 - exp a) are log-odds. Its loss is
            beta times that, plus -a_chosen (Hong et al., arXiv 2403.07691, equations 6 and 7,
            whose lambda beta is)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec

# Those of the papers' settings for SimPO of Llama 3 8B; ORPO's own lambda is 0.1 to 1.
_BETAS, _GAMMA = {"simpo": 2.0}, 1.0


def _usual_beta(data: dict[str, Any]) -> float:
    return _BETAS.get(data.get("method", ""), 0.1)


def _usual_gamma(data: dict[str, Any]) -> float | None:
    return _GAMMA if data.get("method") == "simpo" else None


class Preference(Spec):
    """What a step learns from pairs, as its data has them, in place of the next token."""

    method: Literal["dpo", "orpo", "simpo"]
    """direct preference optimisation, or by odds, or by mean log-probabilities: the last two
    compare with no starting model"""
    beta: float = Field(default_factory=_usual_beta, gt=0)
    """what log-probabilities count: of dpo beside the starting model's (larger: closer to that
    model), of simpo their means; of orpo what its loss of odds counts; default: 0.1, of simpo 2"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """the share of pairs that are told the wrong way round"""
    gamma: float | None = Field(
        default_factory=_usual_gamma, ge=0, exclude_if=lambda gamma: gamma is None
    )
    """simpo: by how much a chosen response should lead; default: 1"""

    @model_validator(mode="after")
    def _check(self) -> Preference:
        if (self.gamma is not None) != (self.method == "simpo"):
            raise InputError(
                f"preference.gamma is {self.gamma} and the method {self.method}; simpo alone has "
                "one, a number: leave gamma out, or use method simpo"
            )
        return self

    @property
    def refers(self) -> bool:
        """Whether it compares with the model that training started from."""
        return self.method == "dpo"
