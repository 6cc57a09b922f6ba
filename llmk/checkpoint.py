"""Selective activation checkpointing by the names of llmk's operators.

PyTorch asks a checkpointing policy about the operators that its dispatcher runs. Of a call of `torch.ops.llmk.rms_norm`
that is the kernel operator which the call is made of, `torch.ops.llmk._rms_norm_fwd`. `context_fn` lets a policy go by
the public names.
"""

import functools
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from llmk.registry import OPS

__all__ = ["context_fn"]

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def context_fn(policy_fn_or_list: Callable[..., Any] | Collection[Any]) -> Callable[[], Contexts]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, for public operators.

    It is `torch.utils.checkpoint.create_selective_checkpoint_contexts` but for the names, in eager mode and under
    `torch.compile`. Make it once, outside the function that is compiled.

    Args:
        policy_fn_or_list: The operators whose outputs are kept, llmk's and others, such as
            `[torch.ops.llmk.rms_norm.default, torch.ops.aten.mm.default]`; the rest is computed again in the backward
            pass. Or `policy_fn(ctx, op, *args, **kwargs)`, which returns a `torch.utils.checkpoint.CheckpointPolicy`:
            `op` is `torch.ops.llmk.rms_norm.default` where llmk's kernel operator runs, whose arguments follow.

    Raises:
        ValueError: The list has something other than overloads, such as `torch.ops.llmk.rms_norm`.
    """
    if callable(policy_fn_or_list):
        return functools.partial(_by_policy, policy_fn_or_list)
    kept = [kernel_op for op in policy_fn_or_list for kernel_op in _kernel_ops().get(op, [op])]
    create_selective_checkpoint_contexts(kept)  # refuses what is no operator
    contexts = functools.partial(_by_list, *map(_path, kept))
    # Names can be pickled, and with this besides AOTAutograd caches the graph.
    contexts.cache_hash = f"llmk.checkpoint:{contexts.args}"  # type: ignore[attr-defined]
    return contexts


def _path(op: Any) -> str:
    """Return the name of an operator under `torch.ops`; a higher-order one only says its own name."""
    return str(op) if "." in str(op) else f"higher_order.{op}"


def _by_list(*paths: str) -> Contexts:
    return create_selective_checkpoint_contexts([attrgetter(path)(torch.ops) for path in paths])


def _by_policy(policy_fn: Callable[..., Any]) -> Contexts:
    def by_public_name(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policy_fn(ctx, public_ops.get(op, op), *args, **kwargs)

    public_ops = {kernel_op: op for op, kernel_ops in _kernel_ops().items() for kernel_op in kernel_ops}
    return create_selective_checkpoint_contexts(by_public_name)


def _kernel_ops() -> dict[Hashable, list[Any]]:
    return {op.overload: [kernel_op.overload for kernel_op in op.kernel_ops] for op in OPS.values()}
