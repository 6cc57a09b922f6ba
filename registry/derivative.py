"""The derivative of a kernel op: its formula, and what holds for every formula without its saying so.

- An output that gets no gradient counts as one whose gradient is zero. An input gets none where no output that depends
  on it does, as in PyTorch: its `grad` stays None, which an optimizer tells from zeros.
- What is kept of the outputs for the backward pass stays part of the graph. So a second derivative through it reaches
  an op that has none and raises, also where neither an input that is kept nor the incoming gradient wants one.
- What the forward pass keeps for the sake of gradients does not bind the backward pass: where a trace in which nobody
  wanted gradients kept less than is needed now, the call is made again.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.registry.private.operators import noted_by

Keeps = Callable[[Sequence[bool], Sequence[Any]], Sequence[bool]]


class Derivative:
    """The autograd formula that `KernelOp.register_autograd` registers; it explains the arguments.

    Args:
        name: The op's name.
        call: Calls the op with all of its arguments.
        results: For each output that has a gradient, the places of the arguments that it depends on.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        backward: Callable[..., Any],
        setup_context: Callable[..., Any],
        results: Sequence[Sequence[int]],
        *,
        takes_none: bool,
        keeps: Keeps | None,
    ) -> None:
        self.name, self.call, self.formula, self.save = name, call, backward, setup_context
        self.results, self.several = results, len(results) > 1
        self.fills = self.several and not takes_none
        self.keeps = keeps
        self._constants = functools.cache(self._find_constants)
        given = itertools.product((False, True), repeat=len(results))
        self._unreached = {each: self._find_unreached(each) for each in given}

    def flags(self, args: tuple[Any, ...]) -> Sequence[bool]:
        """The op's last arguments, for a call with those before them."""
        assert self.keeps is not None
        if not torch.is_grad_enabled():
            return self.keeps([False] * len(args), args)
        return self.keeps([isinstance(arg, Tensor) and arg.requires_grad for arg in args], args)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any, *, has_inputs: bool = False) -> None:
        """Save what the formula needs, unless the context has all inputs to make the call again."""
        ctx.set_materialize_grads(False)
        if not has_inputs:
            ctx.inputs = None
            self.save(ctx, inputs, output)
        if self.several:
            constants = self._constants(ctx.needs_input_grad)
            if constants:
                ctx.mark_non_differentiable(*[output[place] for place in constants])
        if self.fills:
            ctx.alike = [_alike(y) for y in output[: len(self.results)]]

    def checked_setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Do the same where the call may have kept too little; refuse what a second derivative takes for a constant."""
        has_inputs = self.keeps is not None and self._keep_inputs(ctx, self.keeps, inputs)
        self.setup_context(ctx, inputs, output, has_inputs=has_inputs)
        saved, marked = noted_by(ctx)
        if marked and not self.several:
            raise RuntimeError(f"llmk::{self.name}: depends_on says which outputs have no gradient, not setup_context")
        given = (*inputs, *(output if isinstance(output, tuple) else (output,)))
        known = {id(tensor) for value in given for tensor in _tensors_of(value)}
        if any(tensor is not None and id(tensor) not in known for tensor in saved):
            raise RuntimeError(
                f"llmk::{self.name}: save_for_backward takes the op's inputs and outputs and nothing else"
            )

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        count = len(self.results)
        for grad in grads[count:]:
            if grad is not None:
                raise NotImplementedError(
                    f"llmk::{self.name}: double backward is not supported, nor is a gradient for what it keeps"
                )
        grads = grads[:count]
        given = tuple([grad is not None for grad in grads])
        if True not in given:
            return (None,) * len(ctx.needs_input_grad)
        unreached = self._unreached[given] if self.several else ()
        if self.fills:
            grads = tuple(_zeros(alike) if grad is None else grad for grad, alike in zip(grads, ctx.alike, strict=True))
        if ctx.inputs is not None:
            ctx = self._again(ctx)
        found = self.formula(ctx, *grads)
        return tuple(None if place in unreached else grad for place, grad in enumerate(found)) if unreached else found

    def backward_with_lists(self, ctx: Any, *grads: Tensor | None) -> Any:
        """Do the same for arguments some of which are lists of tensors, which get no gradient."""
        found = self.backward(ctx, *grads)
        needs = ctx.needs_input_grad  # a list for a list, and PyTorch expects a None for each tensor
        return tuple(
            [None] * len(need) if isinstance(need, list) else grad for grad, need in zip(found, needs, strict=True)
        )

    def _find_unreached(self, given: Sequence[bool]) -> set[int]:
        """The places of the arguments on which no output with a gradient depends."""
        reached = {place for of, has in zip(self.results, given, strict=True) if has for place in of}
        return {place for of in self.results for place in of} - reached

    def _find_constants(self, needs: tuple[bool, ...]) -> list[int]:
        """The outputs that depend on nothing that wants a gradient."""
        return [place for place, of in enumerate(self.results) if not any(needs[i] for i in of)]

    def _keep_inputs(self, ctx: Any, keeps: Keeps, inputs: tuple[Any, ...]) -> bool:
        """Keep all inputs where the forward pass was told to keep less than the gradients that are wanted need."""
        flags = keeps(ctx.needs_input_grad, inputs)
        given = inputs[len(inputs) - len(flags) :]
        if all(has or not needs for has, needs in zip(given, flags, strict=True)):
            return False
        ctx.save_for_backward(*(tensor for value in inputs for tensor in _tensors_of(value)))
        ctx.inputs = [_without_tensors(value) for value in (*inputs[: -len(flags)], *flags)]
        return True

    def _again(self, ctx: Any) -> "_Context":
        """Call the op again with the flags that keep enough, and return the context for the formula."""
        tensors = iter(ctx.saved_tensors)
        inputs = tuple(_with_tensors(kept, tensors) for kept in ctx.inputs)
        context = _Context(ctx.needs_input_grad)
        self.save(context, inputs, self.call(*inputs))
        return context


class _Context:
    """The part of autograd's context that a formula and its `setup_context` use."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _tensors_of(value: Any) -> Sequence[Tensor]:
    """Return the tensors of an argument that is one, or a list of them."""
    if isinstance(value, Tensor):
        return (value,)
    return value if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor) else ()


def _without_tensors(value: Any) -> Any:
    """Return None for a tensor, their number for a list of them, and for anything else a tuple of it."""
    if isinstance(value, Tensor):
        return None
    return len(_tensors_of(value)) or (value,)


def _with_tensors(kept: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the argument that `_without_tensors` was given."""
    if kept is None:
        return next(tensors)
    return kept[0] if isinstance(kept, tuple) else [next(tensors) for _ in range(kept)]


def _alike(output: Tensor) -> Any:
    """Return what zeros like an output are made from, without its memory; a DTensor itself, which hides its layout."""
    if type(output) is not Tensor and hasattr(output, "__tensor_flatten__"):  # one that wraps others
        return output.detach()
    return output.shape, output.dtype, output.device


def _zeros(alike: Any) -> Tensor:
    if isinstance(alike, Tensor):
        return torch.zeros_like(alike)
    shape, dtype, device = alike
    return torch.zeros(shape, dtype=dtype, device=device)
