"""The largest value with which a plan still fits: sequence length, layers, or micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from bigplan.engines import make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.search import Watch, unwatched
from bigplan.spec.architecture import MOST_LAYERS
from bigplan.spec.training import MOST_TOKENS

T = TypeVar("T")

GRAIN = 256  # tokens: sequence lengths are multiples of it
CLOSE = 16  # the search ends when the gap is a sixteenth of the value
MOST_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Largest:
    """The plan has `now`, `value` also fits, and `next` does not fit (None: none was found).

    `subject`: sequence_length, layers, or micro_batch (sequences that a GPU computes at once).
    `step_seconds` are those of some plan with `value`, not the fastest, whose step has
    `tokens_per_step`: longer sequences are as many, and of micro-batches each GPU has one. Both are
    None where `value` is `now`.
    """

    subject: str
    now: int
    value: int
    next: int | None
    parameters: int  # of the model with `value`
    step_seconds: float | None
    tokens_per_step: int | None


@dataclass(frozen=True, slots=True)
class _Question:
    subject: str
    now: int
    grain: int
    most: int
    asked: Callable[[int], Request]


def largest_value(
    low: int, high: int, fits: Callable[[int], T | None], close: int = 0
) -> tuple[int, int, T | None]:
    """The largest of low..high that fits, the smallest that did not, and the answer of the largest.

    The second is high + 1 if all fit. The third is None if only `low` fits. This assumes that `low`
    fits, and that whatever fits also fits with every smaller value. The stride doubles until a
    value does not fit. Then the gap is halved until it is at most 1, or with `close` at most the
    value divided by `close`.
    """
    answer: T | None = None
    top, stride = high + 1, max(1, low)  # `low` fits, `top` does not
    while top - low > max(1, low // close if close and top <= high else 1):
        middle = min(low + stride, top - 1) if top > high else (low + top) // 2
        found = fits(middle)
        if found is None:
            top = middle
        else:
            answer, low, stride = found, middle, 2 * stride
    return low, top, answer


def largest_that_fit(
    request: Request,
    plan: Plan,
    go_on: Callable[[], bool] = lambda: True,
    watch: Watch = unwatched,
) -> Iterator[Largest]:
    """The longest sequence, the deepest model and the largest micro-batch, one after the other.

    Everything else stays as it is. A search ends with its first plan, so an answer says that a
    value fits, not how fast it can be. Once `go_on` says stop, the current question is answered
    with the largest value found so far, if there is one, and no other any more.
    """
    for question in _questions(request, plan):
        answer = _answer(question, plan, go_on, watch)
        if answer.step_seconds is not None or go_on():
            yield answer
        if not go_on():
            return


def _answer(question: _Question, plan: Plan, go_on: Callable[[], bool], watch: Watch) -> Largest:
    beyond: int | None = None

    def fits(number: int) -> Plan | None:
        nonlocal beyond
        found = _fits(question.asked(number * question.grain), watch) if go_on() else None
        if found is None and go_on():  # else it was not looked for to the end
            beyond = number * question.grain
        return found

    low = question.now // question.grain
    high = max(low, question.most // question.grain)
    value, _, found = largest_value(low, high, fits, CLOSE)
    return Largest(
        question.subject,
        question.now,
        question.now if found is None else value * question.grain,
        beyond,
        (plan if found is None else found).model.parameter_count,
        None if found is None else found.predicted.step_seconds,
        None if found is None else found.training.tokens_per_step,
    )


def _questions(request: Request, plan: Plan) -> Iterator[_Question]:
    model, training, gpus = request.model, request.training, request.cluster.gpus
    length = training.sequence_length
    grain = GRAIN if length % GRAIN == 0 else length

    def longer(value: int) -> Request:
        return _with(request, sequence_length=value)

    def deeper(value: int) -> Request:
        return replace(request, model=model.model_copy(update={"layers": value}))

    def wider(value: int) -> Request:
        # With this batch every number of data-parallel ranks has at least one whole micro-batch.
        settings = {**request.settings, "micro_batch": value}
        return replace(_with(request, global_batch=value * gpus), settings=settings)

    most = MOST_TOKENS // training.global_batch
    if model.positions == "learned":
        most = min(most, model.max_sequence_length)
    yield _Question("sequence_length", length, grain, most, longer)
    yield _Question("layers", model.layers, 1, MOST_LAYERS, deeper)
    if "micro_batch" not in request.settings:
        most = min(MOST_AT_ONCE, MOST_TOKENS // (length * gpus))
        yield _Question("micro_batch", plan.strategy.micro_batch, 1, most, wider)


def _with(request: Request, **changed: int) -> Request:
    return replace(request, training=request.training.model_copy(update=changed))


def _fits(request: Request, watch: Watch) -> Plan | None:
    """The first plan of a search; None where nothing fits, or `watch` stopped the search."""

    def until_found(best: float | None, bound: float, left: int) -> bool:
        return best is None and watch(best, bound, left)

    try:
        return make_plan(replace(request, told=False), until_found)
    except (InfeasibleError, InputError):
        return None
