"""What a module computes, found by running it.

A module is run on random input, with random parameters in place of its own, in float32 on the CPU: nothing of it is
changed and its parameters need not be there. The outcome and its gradients are compared with the operator's.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

AGREEMENT = 1e-5
"""The largest difference, relative to the largest value, of two ways to compute the same in float32."""


class Outcome:
    """A module's output for random input and parameters, and the gradients of both.

    Each axis of the parameters is `divisor` times shorter than in the module, to be done sooner.
    """

    def __init__(self, module: nn.Module, input: Tensor, divisor: int = 1) -> None:
        self.input = input.requires_grad_()
        self.parameters = {name: _random_like(parameter, divisor) for name, parameter in module.named_parameters()}
        buffers = {name: buffer.float().cpu() for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        with torch.autocast("cpu", enabled=False):
            self.output = functional_call(module, {**self.parameters, **buffers}, (self.input,))
        if not isinstance(self.output, Tensor) or not self.output.requires_grad:
            raise TypeError("its output is not one differentiable tensor")
        self.upstream = torch.randn_like(self.output)
        self.gradients = self._gradients(self.output)

    def _gradients(self, output: Tensor) -> list[Tensor | None]:
        wanted = [self.input, *self.parameters.values()]
        return list(torch.autograd.grad(output, wanted, self.upstream, allow_unused=True))

    def equals(self, compute: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> bool:
        """Whether `compute(input, parameters)` gives the same output and gradients."""
        output = compute(self.input, self.parameters)
        if output.shape != self.output.shape or not agree(output, self.output):
            return False
        gradients = zip(self._gradients(output), self.gradients, strict=True)
        return all(a is b is None or (a is not None and b is not None and agree(a, b)) for a, b in gradients)


def _random_like(parameter: Tensor, divisor: int) -> Tensor:
    if not parameter.is_floating_point():
        raise TypeError(f"its parameters are {str(parameter.dtype).removeprefix('torch.')}")
    shape = [size // divisor for size in parameter.shape]
    fan_in = shape[-1] if len(shape) > 1 else 1
    return (torch.randn(shape) / fan_in**0.5).requires_grad_()


def agree(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= AGREEMENT * b.abs().max())


def takes_one_input(module: nn.Module) -> bool:
    """Whether `forward` has one argument: one that has more may use them."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for two modules that compute the same of their parameters, so that one of them needs to be run."""
    return tuple(_fingerprints(module))


def _fingerprints(module: nn.Module) -> Iterator[Any]:
    for name, part in module.named_modules():
        shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in part.named_parameters(recurse=False))
        plain = tuple((k, v) for k, v in vars(part).items() if isinstance(v, int | float | str | None))
        yield name, type(part), shapes, plain, id(vars(part).get("config"))
