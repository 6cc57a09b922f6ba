"""The registry: one record per operator, and the one way an operator is registered.

`public_op` registers what people call, `torch.ops.llmk.NAME`; `KernelOp` registers the private operators it is made of,
one per step that launches kernels. `OPS` holds the records, which opcheck, the tests, the benchmarks and the docs read.
Whoever asks for `OPS` here gets all of them: the operators are loaded first.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmk.registry import record
from llmk.registry.backward_op import no_gradient, or_no_gradient
from llmk.registry.call import CallOp, FromArguments, from_arguments, with_arguments
from llmk.registry.checks import (
    LARGEST,
    check_dtype,
    check_finite,
    check_flag,
    check_floating,
    check_integer,
    check_like,
    check_not_negative,
    check_number,
    check_option,
    check_parameter,
    check_positive,
    check_rows,
    check_same,
    check_shape,
    check_size,
    check_switch,
)
from llmk.registry.devices import (
    autocast_dtype,
    cdiv,
    grid_cap,
    max_warps,
    next_power_of_2,
    num_programs,
    shared_memory,
    size_hint,
    use_kernels_on_cpu,
)
from llmk.registry.eager.bypass import set_short_path_enabled
from llmk.registry.gradient import differentiating, gradient_of
from llmk.registry.graphs import recomputed_in_backward
from llmk.registry.jit import jit
from llmk.registry.kernel_op import KernelOp, like_first, wrap_triton
from llmk.registry.launch import empty, empty_in_order
from llmk.registry.public_op import public_op
from llmk.registry.record import RULE, BatchDependent, Cost, Op, Sample, Tolerance
from llmk.registry.sharding import (
    PARTIAL,
    REPLICATE,
    axes,
    foreign_kind,
    is_sharded,
    replicate_only,
    row_axes,
    split_around_dim,
    split_rows,
)

if TYPE_CHECKING:
    from llmk.registry.record import OPS

__all__ = [
    "LARGEST",
    "OPS",
    "PARTIAL",
    "REPLICATE",
    "RULE",
    "BatchDependent",
    "CallOp",
    "Cost",
    "FromArguments",
    "KernelOp",
    "Op",
    "Sample",
    "Tolerance",
    "autocast_dtype",
    "axes",
    "cdiv",
    "check_dtype",
    "check_finite",
    "check_flag",
    "check_floating",
    "check_integer",
    "check_like",
    "check_not_negative",
    "check_number",
    "check_option",
    "check_parameter",
    "check_positive",
    "check_rows",
    "check_same",
    "check_shape",
    "check_size",
    "check_switch",
    "differentiating",
    "empty",
    "empty_in_order",
    "foreign_kind",
    "from_arguments",
    "gradient_of",
    "grid_cap",
    "is_sharded",
    "jit",
    "like_first",
    "max_warps",
    "next_power_of_2",
    "no_gradient",
    "num_programs",
    "or_no_gradient",
    "public_op",
    "recomputed_in_backward",
    "replicate_only",
    "row_axes",
    "set_short_path_enabled",
    "shared_memory",
    "size_hint",
    "split_around_dim",
    "split_rows",
    "use_kernels_on_cpu",
    "with_arguments",
    "wrap_triton",
]


def __getattr__(name: str) -> Any:
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("llmk.ops")
    return record.OPS
