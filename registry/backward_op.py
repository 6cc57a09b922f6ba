"""A derivative that is one kernel op, which says by its arguments' names what it needs of the forward pass.

Of the backward op's arguments the first are the incoming gradients, one for each output that has a gradient. Each of
the others is what its name says: an argument of the forward op, one of its outputs, or as `need_NAME` whether the
argument NAME wants a gradient. What it returns are the gradients of those arguments that an output depends on, in the
order of the forward op; for one that nobody wants `no_gradient` stands.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from llmk.registry.by_name import by_name
from llmk.registry.launch import empty

_NEEDED = "need_"


def no_gradient(grad: Tensor) -> Tensor:
    """What a backward op returns for a gradient that nobody wants, `[0]` of the incoming gradient's dtype."""
    return empty((0,), grad.dtype, grad.device)


class BackwardOp:
    """What `KernelOp.register_autograd` takes, made of the two ops' schemas.

    Args:
        forward: The forward op's schema.
        backward: The backward op's.
        call: Calls the backward op.
        outputs: Names for the forward op's outputs.
        of: The names of the arguments that have gradients.
        incoming: How many of the outputs have one.
        saved_if: For tensors that the backward op does not always need whether it does.

    Raises:
        ValueError: The two schemas do not fit.
    """

    def __init__(
        self,
        forward: torch.FunctionSchema,
        backward: torch.FunctionSchema,
        call: Callable[..., Any],
        outputs: Sequence[str],
        of: Sequence[str],
        incoming: int,
        saved_if: Mapping[str, Callable[..., bool]],
    ) -> None:
        self.call = call
        names = [argument.name for argument in forward.arguments]
        self.backward_names = [argument.name for argument in backward.arguments]
        found = [*names, *outputs]
        after = self.backward_names[incoming:]
        flags = [name for name in after if name.startswith(_NEEDED) and name.removeprefix(_NEEDED) in names]
        unknown = [name for name in after if name not in found and name not in flags]
        unknown += [name for name in saved_if if name not in after]
        if unknown or len(outputs) != len(forward.returns) or len(backward.returns) != len(of):
            raise ValueError(
                f"{backward.name}: expected the gradients of {', '.join(of)} from arguments named after those of "
                f"{forward} or its outputs {', '.join(outputs)}, got {backward}"
            )
        tensors = {argument.name for argument in forward.arguments if "Tensor" in str(argument.type)} | {*outputs}
        self.of = of
        self.nothing: list[Tensor | None] = [None] * len(names)
        self.places = [names.index(name) for name in of]
        saved = [name for name in after if name in tensors]
        numbers = [name for name in after if name in names and name not in tensors]
        kept = [*saved, *numbers, *flags]
        self.saved, self.numbers = (_items([found.index(name) for name in some]) for some in (saved, numbers))
        self.flags = _items([names.index(name.removeprefix(_NEEDED)) for name in flags])
        self.in_order = _items([kept.index(name) for name in after])
        known = [*names, *(_NEEDED + name for name in names)]
        self.saved_if = [
            (saved.index(name), by_name(condition, known, forward.name)) for name, condition in saved_if.items()
        ]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
        saved = self.saved(found)
        if self.saved_if:
            saved = self._needed(saved, (*inputs, *ctx.needs_input_grad))
        ctx.save_for_backward(*saved)
        ctx.numbers = self.numbers(found)

    def _needed(self, saved: Sequence[Tensor | None], known: Sequence[Any]) -> list[Tensor | None]:
        needed = list(saved)
        for place, condition in self.saved_if:
            if not condition(*known):
                needed[place] = None
        return needed

    def backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = self.call(*grads, *self.in_order((*ctx.saved_tensors, *ctx.numbers, *self.flags(needs))))
        gradients = self.nothing.copy()
        for place, gradient in zip(self.places, found if isinstance(found, tuple) else (found,), strict=True):
            if needs[place]:
                gradients[place] = gradient
        return tuple(gradients)

    def fake(self, *args: Any) -> Any:
        """The backward op's: each gradient like its argument, contiguous. It must take these arguments."""
        given = dict(zip(self.backward_names, args, strict=True))
        gradients = [
            given[name].new_empty(given[name].shape)
            if given[name] is not None and given.get(_NEEDED + name, True)
            else args[0].new_empty((0,))
            for name in self.of
        ]
        return tuple(gradients) if len(gradients) > 1 else gradients[0]


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes so many items out of a sequence, faster than a loop."""
    if len(places) > 1:
        return itemgetter(*places)
    start, end = (places[0], places[0] + 1) if places else (0, 0)
    return lambda values: values[start:end]
