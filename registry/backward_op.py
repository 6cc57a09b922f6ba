"""A derivative that is one kernel op, which says by its arguments' names what it needs of the forward pass.

Of the backward op's arguments the first are the incoming gradients, one for each output that has a gradient. Each of
the others is what its name says: an argument of the forward op, one of its outputs, or as `need_NAME` whether the
argument NAME wants a gradient. What it returns are the gradients of those arguments that an output depends on, in the
order of the forward op; for one that nobody wants `no_gradient` stands.

The two functions that autograd asks for are written as one would by hand, and compiled: no loop over names is left to a
call. Of an op of `input` and `weight`, whose backward op takes `grad, input, weight, need_weight`:

    def setup_context(ctx, inputs, output):
        needs = ctx.needs_input_grad
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.numbers = []

    def backward(ctx, grad_0):
        needs, saved, numbers = ctx.needs_input_grad, ctx.saved_tensors, ctx.numbers
        d_input, d_weight = call(grad_0, saved[0], saved[1], needs[1])
        return (d_input if needs[0] else None, d_weight if needs[1] else None,)
"""

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.registry.launch import empty
from llmk.registry.sharding import PARTIAL, REPLICATE, ShardingStrategy, Split

_NEEDED = "need_"
_SPLITS_OF_GRADIENTS: dict[Split, Split] = {REPLICATE: PARTIAL, PARTIAL: REPLICATE}


def no_gradient(grad: Tensor) -> Tensor:
    """Return a backward op's result for a gradient that nobody wants: `[0]`, of the incoming gradient's dtype."""
    return empty((0,), grad.dtype, grad.device)


def or_no_gradient(gradient: Tensor | None, grad: Tensor) -> Tensor:
    """Return the gradient, or `no_gradient` where there is none."""
    return no_gradient(grad) if gradient is None else gradient


class BackwardOp:
    """Arguments for `KernelOp.register_autograd`, made of the two ops' schemas.

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
        self.of, self.outputs, self.incoming = of, outputs, incoming
        self.forward_arguments, self.backward_arguments = forward.arguments, backward.arguments
        self.backward_names = [argument.name for argument in backward.arguments]
        given = self.backward_names[incoming:]
        names = [argument.name for argument in forward.arguments]
        known = {*names, *outputs, *(_NEEDED + name for name in names)}
        unknown = [name for name in given if name not in known]
        unknown += [name for name in saved_if if name not in given]
        if unknown or len(outputs) != len(forward.returns) or len(backward.returns) != len(of):
            raise ValueError(
                f"{backward.name}: expected the gradients of {', '.join(of)} from arguments named after those of "
                f"{forward} or its outputs {', '.join(outputs)}, got {backward}"
            )
        conditions = {f"saves_{name}": condition for name, condition in saved_if.items()}
        source = _source(forward, outputs, of, incoming, given, saved_if)
        written = _written(source, f"<backward of {forward.name}>", {"call": call} | conditions)
        self.setup_context, self.backward = written["setup_context"], written["backward"]

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

    def sharding_from(self, forward: ShardingStrategy) -> ShardingStrategy:
        """The backward op's strategy, from the forward op's: what is in both is split alike in both.

        A gradient is split like what it is the gradient of. Of an argument that every process has all of, each process
        makes the part that comes through its own outputs; of an output that is a sum each has the whole gradient.
        """
        tensors = [argument.name for argument in self.forward_arguments if "Tensor" in str(argument.type)]
        kept = [argument.name for argument in self.backward_arguments if "Tensor" in str(argument.type)][
            self.incoming :
        ]

        def strategy(*args: Any) -> Iterator[tuple[list[Split], list[Split]]]:
            given = dict(zip(self.backward_names, args, strict=True))
            for of_outputs, of_inputs in forward(*(given.get(argument.name) for argument in self.forward_arguments)):
                split = dict(zip([*self.outputs, *tensors], [*of_outputs, *of_inputs], strict=True))
                incoming = [REPLICATE if split[name] == PARTIAL else split[name] for name in self.outputs]
                gradients = [
                    _SPLITS_OF_GRADIENTS.get(split[name], split[name])
                    if given.get(name, args[0]) is not None and given.get(_NEEDED + name, True)
                    else REPLICATE
                    for name in self.of
                ]
                yield gradients, [*incoming[: self.incoming], *(split[name] for name in kept)]

        return strategy


def _source(
    forward: torch.FunctionSchema,
    outputs: Sequence[str],
    of: Sequence[str],
    incoming: int,
    given: Sequence[str],
    saved_if: Mapping[str, Callable[..., bool]],
) -> str:
    """The text of the two functions; `given` are the backward op's arguments after the incoming gradients."""
    names = [argument.name for argument in forward.arguments]
    tensors = {argument.name for argument in forward.arguments if "Tensor" in str(argument.type)} | {*outputs}
    inputs, needs = _items("inputs", names), _items("needs", [_NEEDED + name for name in names])
    found = inputs | (_items("output", outputs) if len(outputs) > 1 else {outputs[0]: "output"})
    saved = [name for name in given if name in tensors]
    numbers = [name for name in given if name in inputs and name not in tensors]

    def to_save(name: str) -> str:
        if name not in saved_if:
            return found[name]
        return f"{found[name]} if {_call_text(f'saves_{name}', saved_if[name], inputs | needs)} else None"

    kept = _items("saved", saved) | _items("numbers", numbers) | needs
    grads = [f"grad_{i}" for i in range(incoming)]
    results = [f"d_{name}" for name in of]
    gradients = [f"d_{name} if {needs[_NEEDED + name]} else None" if name in of else "None" for name in names]
    return f"""
def setup_context(ctx, inputs, output):
    needs = ctx.needs_input_grad
    ctx.save_for_backward({", ".join(to_save(name) for name in saved)})
    ctx.numbers = [{", ".join(inputs[name] for name in numbers)}]

def backward(ctx, {", ".join(grads)}):
    needs, saved, numbers = ctx.needs_input_grad, ctx.saved_tensors, ctx.numbers
    {", ".join(results)} = call({", ".join([*grads, *(kept[name] for name in given)])})
    return ({", ".join(gradients)},)
"""


def _items(of: str, names: Sequence[str]) -> dict[str, str]:
    """Return the texts of the items of a sequence, by their names."""
    return {name: f"{of}[{i}]" for i, name in enumerate(names)}


def _call_text(name: str, fn: Callable[..., Any], arguments: Mapping[str, str]) -> str:
    """The text of a call of `fn`, whose parameters are named after arguments."""
    parameters = list(inspect.signature(fn).parameters)
    unknown = [parameter for parameter in parameters if parameter not in arguments]
    if unknown:
        raise ValueError(f"{name}: no argument is called {', '.join(unknown)}, but {', '.join(arguments)}")
    return f"{name}({', '.join(arguments[parameter] for parameter in parameters)})"


def _written(source: str, filename: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the names that a source text defines; tracebacks show its lines."""
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    exec(compile(source, filename, "exec"), known)
    return known
