"""A call in which only some outputs have an incoming gradient."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from llmk.registry import Op


def detached_but(op: Op, kept: Collection[int]) -> Callable[..., tuple[Tensor, ...]]:
    """The operator, whose outputs at other positions than `kept` take no part in backward."""

    def fn(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        outputs = op.overload(*args, **kwargs)
        return tuple(output if i in kept else output.detach() for i, output in enumerate(outputs))

    return fn
