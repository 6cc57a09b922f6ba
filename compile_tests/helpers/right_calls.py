"""A call of an operator, or of a loss as a record, held to the accuracy rule."""

from collections.abc import Callable
from typing import Any

from llmk.opcheck.calls import call, incoming_gradients, require_accurate
from llmk.opcheck.inputs import Outcome
from llmk.registry import Op, Sample


def require_call(op: Op, sample: Sample, *, grads: Callable[..., Any] = incoming_gradients, **options: Any) -> Outcome:
    """Make the call as `llmk.opcheck.calls.call` does, require outputs and gradients to be right, and return them."""
    outcome = call(op, sample, grads=grads, **options)
    require_accurate(op, sample, outcome, grads)
    return outcome
