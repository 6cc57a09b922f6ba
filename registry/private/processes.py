"""Private names of DTensor, and of collectives that a graph may hold."""

from typing import Any

from llmk.registry.private.names import attribute, find, required


def tell_calls_apart(overload: Any, *, has_lists: bool) -> bool:
    """Have DTensor tell apart calls that differ in a flag, a string or in which tensor is None; False if it cannot.

    `has_lists` says that arguments are lists of tensors, in which DTensor is to look.
    """
    from torch.distributed.tensor import DTensor

    dispatcher = attribute(DTensor, "_op_dispatcher", lambda _: None)
    static_arguments = find("torch.distributed.tensor._op_schema.RuntimeSchemaInfo")
    if None in (dispatcher, static_arguments):
        return False
    dispatcher.sharding_propagator.op_to_schema_info[overload] = static_arguments(
        static_argnum=1, needs_pytree=has_lists
    )
    return True


collectives = required("torch.ops._c10d_functional")
"""Collectives that a graph may hold: they return their result. `torch.distributed`'s own write into a tensor."""
group_named = required("torch.distributed.distributed_c10d._resolve_process_group")
