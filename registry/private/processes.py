"""DTensor, and what a graph may hold of processes that communicate."""

from typing import Any

from llmk.registry.private.names import attribute, find, required


def tell_calls_apart(overload: Any) -> bool:
    """Have DTensor tell apart calls that differ in a flag, a string or in which tensor is None; whether it will."""
    from torch.distributed.tensor import DTensor

    dispatcher = attribute(DTensor, "_op_dispatcher", lambda _: None)
    static_arguments = find("torch.distributed.tensor._op_schema.RuntimeSchemaInfo")
    if None in (dispatcher, static_arguments):
        return False
    dispatcher.sharding_propagator.op_to_schema_info[overload] = static_arguments(static_argnum=1)
    return True


collectives = required("torch.ops._c10d_functional")
"""What a graph may hold: they return what they communicate. `torch.distributed`'s own write into a tensor."""
group_named = required("torch.distributed.distributed_c10d._resolve_process_group")
