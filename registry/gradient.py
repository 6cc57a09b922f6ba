"""The derivative of a plain function, also in the body of an operator, where autograd is switched off.

PyTorch runs an operator's body below autograd: its dispatch keys are excluded, or gradients are disabled. What the body
computes has no graph, and a caller's graph ends at the operator. `gradient_of` restores the keys for one function.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.registry.private.modes import saved_tensors_unhooked
from llmk.registry.private.operators import autograd_keys


def gradient_of(value: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return `value(*tensors)`, a scalar, and its derivatives, None by a tensor that it does not use.

    Both are detached, other tensors that it uses are constants, and a caller's hooks on saved tensors are not called.
    An op that may be called with tensors of inference mode has a body that is `differentiating`.
    """
    with (
        autograd_keys(),
        torch.enable_grad(),
        saved_tensors_unhooked(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        result = value(*leaves)
        if not result.requires_grad:
            return result, (None,) * len(leaves)
        found = torch.autograd.grad(result, leaves, allow_unused=True)
    return result.detach(), tuple([None if grad is None else grad.contiguous() for grad in found])


def differentiating(
    body: Callable[..., Any], arguments: Callable[[list[Any]], Iterable[Any]] = iter
) -> Callable[..., Any]:
    """Wrap the body of an op which calls `gradient_of`: autograd refuses tensors that were made in inference mode.

    The body runs outside that mode, and gets such tensors as ordinary ones of the same memory. It takes the `arguments`
    that the op's are made into.
    """

    def run(*args: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return body(*arguments(_ordinary(args)))
        with torch.inference_mode(False), torch.no_grad():
            return body(*arguments(_ordinary(args)))

    return functools.update_wrapper(run, body)


def _ordinary(values: Sequence[Any]) -> list[Any]:
    ordinary = list(values)
    for i, value in enumerate(ordinary):
        if isinstance(value, list):
            ordinary[i] = _ordinary(value)
        elif isinstance(value, Tensor) and value.is_inference():
            alias = torch.empty((0,), dtype=value.dtype, device=value.device)
            ordinary[i] = alias.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return ordinary
