"""Sharding strategies: the axes along which DTensor may split a kernel op's tensors over processes.

A strategy lists the ways to split, with one entry for each tensor:

- a number: the tensor is split along this axis;
- `REPLICATE`: every process has all of it;
- `PARTIAL`: every process has a tensor of the full shape, and their sum is meant.

An entry for a list of tensors is that of each.

DTensor chooses the cheapest of them for its inputs, and communicates if none fits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from llmk.registry.private.operators import schema_of
from llmk.registry.private.processes import tell_calls_apart
from llmk.registry.private.tensors import PLAIN_MODULES

REPLICATE, PARTIAL = "replicate", "partial"

Split = int | str
ShardingStrategy = Callable[..., Iterable[tuple[Sequence[Split], Sequence[Split]]]]


def axes(tensor: Any) -> range:
    """Return all axes of a tensor, for an elementwise operator."""
    return range(tensor.ndim)


def row_axes(tensor: Any) -> range:
    """Return all axes but the last, for an operator on independent rows."""
    return range(tensor.ndim - 1)


def replicate_only(*args: Any) -> list[Any]:
    """The strategy of an operator that cannot be split: inputs are gathered, and every process computes it all."""
    return []


def split_rows(outputs: int, inputs: int, parameters: int = 0) -> ShardingStrategy:
    """The strategy of an operator on rows of its first arguments; the parameters after them are replicated."""

    def strategy(*args: Any) -> Iterable[tuple[list[Split], list[Split]]]:
        return [([axis] * outputs, [*[axis] * inputs, *[REPLICATE] * parameters]) for axis in row_axes(args[0])]

    return strategy


def split_around_dim(*args: Any) -> Iterable[tuple[list[Split], list[Split]]]:
    """The strategy of an operator along one axis, its last argument, of the tensors before it."""
    return [([axis], [axis] * (len(args) - 1)) for axis in axes(args[0]) if axis != args[-1]]


def register_strategy(overload: Any, strategy: ShardingStrategy) -> None:
    """Give DTensor an operator's strategy; everything replicated is always allowed beside it."""
    if not torch.distributed.is_available():
        return
    # torch.compile has imported these already: they cost no time.
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    schema = schema_of(overload)
    tensors = [i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
    outputs = len(schema.returns)
    everything_replicated = [REPLICATE] * outputs, [REPLICATE] * len(tensors)

    def placement(split: Split) -> Any:
        if isinstance(split, int):
            return Shard(split)
        return {REPLICATE: Replicate(), PARTIAL: Partial()}[split]

    def acceptable(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        found = []
        for of_outputs, of_inputs in (*(strategy(*args) if told_apart else ()), everything_replicated):
            if len(of_outputs) != outputs or len(of_inputs) != len(tensors):
                raise ValueError(
                    f"{overload}: expected a sharding strategy of {outputs} outputs and {len(tensors)} tensors, "
                    f"got {of_outputs} and {of_inputs}"
                )
            splits = dict(zip(tensors, of_inputs, strict=True))
            inputs: list[Any] = []
            for i, arg in enumerate(args):
                each = arg if isinstance(arg, list | tuple) and i in splits else [arg]
                inputs += [None if i not in splits or item is None else placement(splits[i]) for item in each]
            found.append(([placement(split) for split in of_outputs], inputs))
        return found

    register_sharding(overload)(acceptable)
    # Left to itself DTensor takes calls for the same that differ in a flag: then none may be split.
    has_lists = any("List[Tensor]" in str(argument.type) for argument in schema.arguments)
    told_apart = tell_calls_apart(overload, has_lists=has_lists)


def is_sharded(*tensors: torch.Tensor) -> bool:
    """Return True if one of them is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any([isinstance(tensor, DTensor) for tensor in tensors])


def foreign_kind(tensor: torch.Tensor) -> str | None:
    """Return the name of the class of a tensor, or of what a DTensor holds, that computes in its own way, else None.

    A quantized weight of torchao's is one, which takes products over; so is a masked or a sparse tensor of PyTorch's.
    """
    held: Any = tensor
    cls = type(held.to_local() if is_sharded(tensor) else tensor)
    module = f"{cls.__module__}."
    return None if module == "torch." or module.startswith(PLAIN_MODULES) else f"{module}{cls.__qualname__}"
