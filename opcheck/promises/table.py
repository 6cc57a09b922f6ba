"""The tables of promises: which there are, and where and in which order they are asked."""

from collections.abc import Callable, Sequence

from llmk.opcheck.foreign.hub import can_torch_compile, has_backward
from llmk.opcheck.promises.compiled import (
    clean_graph,
    compiled,
    compiled_samples,
    compiled_shapes,
    exported_trains,
    no_recompile,
)
from llmk.opcheck.promises.gpu import cuda_graphs, no_host_sync, other_stream
from llmk.opcheck.promises.gradients import (
    expanded_gradient,
    finite_gradients,
    input_subsets,
    scaled_gradient,
    second_backward,
    strided_gradient,
    undefined_gradients,
)
from llmk.opcheck.promises.kernels import (
    any_program_order,
    every_kernel_ends,
    far_rows,
    in_bounds,
    long_offsets,
    no_float_atomics,
)
from llmk.opcheck.promises.refusals import refuses_transforms, second_derivatives
from llmk.opcheck.promises.results import (
    deterministic,
    edge_rows,
    every_element_written,
    no_alias,
    no_mutation,
    same_on_short_path,
    strided_inputs,
    torch_opcheck,
    values_and_gradients,
)
from llmk.opcheck.promises.rows import batch_invariant
from llmk.opcheck.promises.settings import (
    another_thread,
    autocast,
    checkpointed,
    default_device,
    default_dtype,
    other_device,
    side_effects,
    two_calls,
)
from llmk.opcheck.promises.values import fresh_numbers, harsh_values, other_sizes
from llmk.registry import Op, Sample

Promise = Callable[[Op, Sequence[Sample]], str | None]


PROMISES: tuple[Promise, ...] = (
    side_effects,
    every_kernel_ends,
    every_element_written,
    torch_opcheck,
    has_backward,
    can_torch_compile,
    values_and_gradients,
    harsh_values,
    fresh_numbers,
    finite_gradients,
    no_mutation,
    no_alias,
    second_backward,
    two_calls,
    scaled_gradient,
    expanded_gradient,
    strided_gradient,
    strided_inputs,
    input_subsets,
    undefined_gradients,
    second_derivatives,
    edge_rows,
    other_sizes,
    far_rows,
    deterministic,
    batch_invariant,
    same_on_short_path,
    compiled_samples,
    another_thread,
    autocast,
    checkpointed,
    default_dtype,
    default_device,
    no_recompile,
    clean_graph,
    exported_trains,
    compiled,
    refuses_transforms,
)
INTERPRETER_PROMISES: tuple[Promise, ...] = (in_bounds, any_program_order, no_float_atomics, long_offsets)
"""Asked first, of the kernels themselves: what is wrong there breaks others as well."""
OF_KERNELS: tuple[Promise, ...] = (*INTERPRETER_PROMISES, every_kernel_ends)
"""Asked of a GPU's kernels in the interpreter."""
ON_REQUEST: tuple[Promise, ...] = (compiled_shapes,)
"""Asked by name only: on a CPU they take longer than all the others."""
GPU_PROMISES: tuple[Promise, ...] = (cuda_graphs, no_host_sync, other_stream, other_device)

IN_ONE_DTYPE: frozenset[Promise] = frozenset(
    {
        has_backward,
        can_torch_compile,
        undefined_gradients,
        second_derivatives,
        refuses_transforms,
        side_effects,
        two_calls,
        another_thread,
        autocast,
        checkpointed,
        default_dtype,
        default_device,
        no_recompile,
        exported_trains,
        other_device,
    }
)
"""Promises about an operator's formulas, not its numbers: checked in the first dtype only."""

OF_LAYERS: frozenset[Promise] = frozenset({has_backward, can_torch_compile})
"""Promises of the layers of kernel repositories alone."""

HABITS: frozenset[Promise] = frozenset(
    {
        batch_invariant,
        same_on_short_path,
        clean_graph,
        exported_trains,
        refuses_transforms,
        no_float_atomics,
        cuda_graphs,
        no_host_sync,
    }
)
"""Promises of llmk's operators that PyTorch asks of none: another's are checked where they are named."""

COMPILED: frozenset[Promise] = frozenset(
    {
        compiled_samples,
        compiled_shapes,
        no_recompile,
        clean_graph,
        exported_trains,
        compiled,
        default_dtype,
        default_device,
    }
)
"""Promises for which Dynamo traces the call."""
