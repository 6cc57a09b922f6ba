"""How a kernel op goes through DTensor: which axes its tensors may be split along, one process holding each part.

An operator's rule says so in a notation of its own, one entry for each tensor:

- a number: the tensor is split along this axis;
- `REPLICATE`: every process has all of it;
- `PARTIAL`: every process has a tensor of the full shape, and their sum is meant.

DTensor chooses the cheapest of a rule's splits for what it is given, and communicates where none fits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from llmk.registry.private.operators import schema_of
from llmk.registry.private.processes import tell_calls_apart

REPLICATE, PARTIAL = "replicate", "partial"

Split = int | str
Rule = Callable[..., Iterable[tuple[Sequence[Split], Sequence[Split]]]]


def axes(tensor: Any) -> range:
    """All axes of a tensor, for what computes each element by itself."""
    return range(tensor.ndim)


def row_axes(tensor: Any) -> range:
    """All axes but the last, for what computes each row by itself."""
    return range(tensor.ndim - 1)


def replicate_only(*args: Any) -> list[Any]:
    """The rule of an operator that cannot be split: DTensor gathers its inputs, and every process computes it all."""
    return []


def register_rule(overload: Any, rule: Rule) -> None:
    """Hand an operator's rule to DTensor; everything replicated is always allowed beside it."""
    if not torch.distributed.is_available():
        return
    # What torch.compile needs has imported these already: they cost no time.
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
        for of_outputs, of_inputs in (*(rule(*args) if told_apart else ()), everything_replicated):
            if len(of_outputs) != outputs or len(of_inputs) != len(tensors):
                raise ValueError(
                    f"{overload}: expected a sharding rule of {outputs} outputs and {len(tensors)} tensors, "
                    f"got {of_outputs} and {of_inputs}"
                )
            inputs: list[Any] = [None] * len(args)
            for i, split in zip(tensors, of_inputs, strict=True):
                if args[i] is not None:
                    inputs[i] = placement(split)
            found.append(([placement(split) for split in of_outputs], inputs))
        return found

    register_sharding(overload)(acceptable)
    # Left to itself DTensor takes calls for the same that differ in a flag: then none may be split.
    told_apart = tell_calls_apart(overload)


def is_sharded(*tensors: torch.Tensor) -> bool:
    """Return True if one of them is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors)
