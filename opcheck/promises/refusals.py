"""The promises about what may be refused; the form is that of results.py.

Right or an exception: of a type that means "not supported", and with words that say what is not.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from llmk.accuracy.neighbours import copy_with_layout, to_float64
from llmk.opcheck.calls import first_line, incoming_gradients, representatives
from llmk.opcheck.inputs import BrokenPromise, as_list, differentiable_inputs, prepare
from llmk.opcheck.promises.gradients import paths_of
from llmk.registry import Op, Sample

_TWICE = "second derivative|double backward|differentiat(e|ing) twice|twice differentiable|derivative|autograd formula"
_FORWARD = "forward.?mode|forward AD|jvp"
_FUNC = "torch.func|functorch|vmap"

Results = list[Tensor | None]


def second_derivatives(op: Op, samples: Sequence[Sample]) -> None:
    """6: second derivatives, for incoming gradients that want one and that do not, are right or refused in words."""
    for path in paths_of(op):
        with path:
            for sample in representatives(op, samples):
                names = differentiable_inputs(op, sample)
                for wanted in dict.fromkeys([*((name,) for name in names), tuple(names)] if names else []):
                    _twice(op, sample, wanted)


def _twice(op: Op, sample: Sample, wanted: Sequence[str]) -> None:
    """Check double backward of some inputs.

    Where the incoming gradient wants one, `once_differentiable` refuses in words; where not, its gradients have no
    graph, and PyTorch refuses to differentiate them.
    """
    refuses = False
    for incoming in (True, False):
        what = f"double backward ({', '.join(wanted)}{', the incoming gradient' if incoming else ''})"
        actual = _attempt(sample, what, _TWICE, partial(_second, op.overload, op, sample, wanted, incoming))
        refuses |= actual is None
        if actual is None or (refuses and all(result is None for result in actual)):
            continue
        try:
            expected = _second(op.reference, op, sample, wanted, incoming, to_float64)
        except RuntimeError:  # the reference has no second derivative to compare with
            return
        _require_close(sample, what, actual, expected, f"gradient of {wanted[0]}")


def _second(
    fn: Callable[..., Any],
    op: Op,
    sample: Sample,
    wanted: Sequence[str],
    incoming: bool,
    change: Callable[[Tensor], Tensor] = copy_with_layout,
) -> Results:
    """The gradients of a sum over the gradients, of the inputs and perhaps the incoming gradients; None where zero."""
    args, kwargs, tensors = prepare(op, sample, wanted, change)
    outputs = [output for output in as_list(fn(*args, **kwargs)) if output.requires_grad]
    given = [grad.requires_grad_(incoming) for grad in incoming_gradients(outputs)]
    inputs = [tensors[name] for name in wanted]
    first = torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True)
    targets = inputs + (given if incoming else [])
    kept = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    if not kept:
        return [None] * len(targets)
    found: Results = list(
        torch.autograd.grad(kept, targets, incoming_gradients(kept), retain_graph=True, allow_unused=True)
    )
    if all(gradient is None for gradient in found):
        torch.autograd.backward(kept, incoming_gradients(kept))  # here `once_differentiable` raises, unused above
    return found


def refuses_transforms(op: Op, samples: Sequence[Sample]) -> None:
    """6: forward-mode AD and torch.func give the right answer, or are refused in words; never zeros."""
    sample = next((s for s in samples if differentiable_inputs(op, s)), None)
    if sample is None:
        return
    wanted = differentiable_inputs(op, sample)
    for what, words, attempt in (
        ("forward-mode AD", _FORWARD, _forward_mode),
        ("torch.func.grad", _FUNC, _func_grad),
    ):
        actual = _attempt(sample, what, words, partial(attempt, op.overload, op, sample, wanted))
        if actual is not None:
            expected = attempt(op.reference, op, sample, wanted)
            _require_close(sample, what, actual, expected)


def _attempt(sample: Sample, what: str, words: str, call: Callable[[], Results]) -> Results | None:
    """Return the result of a call; None if it is refused as it should be."""
    try:
        return call()
    except BrokenPromise as error:
        raise BrokenPromise(f"{sample}: {what}: {error}", error.wrong) from error
    except (NotImplementedError, RuntimeError) as error:
        if not re.search(words, str(error), re.IGNORECASE):
            raise BrokenPromise(
                f"{sample}: {what} raises what does not say so: {type(error).__name__}: {error}"
            ) from error
    except Exception as error:
        raise BrokenPromise(f"{sample}: {what} raises {first_line(error)}") from error
    return None


def _require_close(sample: Sample, what: str, actual: Results, expected: Results, wrong: str = "") -> None:
    """Require results that agree to a few percent: what goes wrong here is zeros, halves and signs."""
    for a, b in zip(actual, expected, strict=True):
        if b is None or b.numel() == 0 or not bool(b.isfinite().all()):
            continue
        error = (b if a is None else a.to(b.dtype) - b).abs().max()
        if not bool(error <= 0.05 * b.abs().max() + 1e-3):
            raise BrokenPromise(f"{sample}: {what} neither raises nor gives the right answer", wrong)


def _scalar(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.stack([output.float().square().sum() for output in as_list(fn(*args, **kwargs))]).sum()


def _forward_mode(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Results:
    with forward_ad.dual_level():

        def dual(tensor: Tensor) -> Tensor:
            copy = copy_with_layout(tensor)
            return forward_ad.make_dual(copy, torch.ones_like(copy)) if copy.is_floating_point() else copy

        args = [
            dual(arg) if name in wanted else arg for name, arg in zip(op.argument_names(), sample.args, strict=False)
        ]
        return [forward_ad.unpack_dual(_scalar(fn, args, sample.kwargs)).tangent]


def _func_grad(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Results:
    position = op.argument_names().index(wanted[0])
    args, kwargs, _ = prepare(op, sample, ())

    def loss(x: Tensor) -> Tensor:
        return _scalar(fn, [*args[:position], x, *args[position + 1 :]], kwargs)

    return [torch.func.grad(loss)(args[position])]
