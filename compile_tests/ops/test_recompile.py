"""No graph is compiled for more rows than the second on the kernel path, too: seen through the stub driver."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.stub_driver import stub_driver
from llmk import functional
from llmk.opcheck.calls import call
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: operators are opaque")


OF_EACH_FAMILY = {op.module.split(".")[2]: name for name, op in OPS.items()}.values()
CASES = some_of(
    [(name, dynamic) for dynamic in (True, None) for name in OPS],
    [(name, True) for name in OF_EACH_FAMILY]
    + [(name, None) for name in ("rms_norm", "rope", "fused_linear_ce", "moe_experts")],
)
"""Of every operator `test_number_of_rows_that_data_decides` asks it, and opcheck's `no_recompile` on the other path."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'symbolic' if case[1] else 'automatic'}")
def test_row_counts_share_a_graph(case: tuple[str, bool | None]) -> None:
    """With every size symbolic too: what must be fixed, such as a block size, is, and nothing else reaches kernels."""
    name, dynamic = case
    op = OPS[name]
    assert op.resized is not None
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(lambda *a, **k: op.overload(*a, **k), backend=counter, fullgraph=True, dynamic=dynamic)
    compiles = []
    with stub_driver():
        for rows in (64, 33, 7, 130, 51, 96, 5000):
            call(op, op.resized(rows, torch.device("cpu"), torch.bfloat16), fn=fn)
            compiles.append(counter.frame_count)
    assert compiles[-1] <= 2, compiles


def _with_rows(tensor: Any, axes: Sequence[int], rows: int, index: Tensor) -> Any:
    """The tensor with these rows of `rows` on its axes, which has one or more entries for each."""
    for dim in axes:
        each = tensor.shape[dim] // rows
        tensor = tensor.index_select(dim, (index.unsqueeze(-1) * each + torch.arange(each)).flatten())
    return tensor


def _compiled_for_some_rows(fn: Callable[..., Any], axes: Sequence[Sequence[int]], rows: int) -> Callable[..., Any]:
    """The function of tensors of which a mask chooses the rows, on the axes of each argument, in one graph."""

    def of_some(mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        index = mask.nonzero().squeeze(-1)
        leaves = [_with_rows(x, dims, rows, index) for x, dims in zip(leaves, axes, strict=True)]
        args, kwargs = tree_unflatten(leaves, spec)
        return fn(*args, **kwargs)

    torch._dynamo.reset()
    return partial(torch.compile(of_some, backend="aot_eager", fullgraph=True), torch.ones(rows) > 0)


def _axes_that_differ(x: Any, y: Any) -> list[int]:
    sizes = zip(x.shape, y.shape, strict=True) if isinstance(x, Tensor) else ()
    return [dim for dim, (a, b) in enumerate(sizes) if a != b]


@pytest.mark.parametrize("name", OPS)
def test_number_of_rows_that_data_decides(name: str) -> None:
    """Rows that a mask chooses, such as the tokens that count: one graph, which does not ask for their number."""
    with stub_driver():
        _call_with_some_rows(name, torch.bfloat16)


@pytest.mark.parametrize("name", some_of(OPS, ("rope", "router_topk_sums", "sparsemax")))
def test_number_of_rows_that_data_decides_on_a_cpu(name: str) -> None:
    _call_with_some_rows(name, torch.float32)


def _call_with_some_rows(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.resized is not None
    sample, other = (op.resized(rows, torch.device("cpu"), dtype) for rows in (12, 7))
    leaves, others = (tree_leaves((each.args, each.kwargs)) for each in (sample, other))
    fn = _compiled_for_some_rows(op.overload, list(map(_axes_that_differ, leaves, others)), 12)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call(op, sample, fn=fn)


@pytest.mark.parametrize(
    ("fn", "shapes", "axes"),
    [
        (functional.causal_conv1d, [(2, 6, 12), (6, 3)], [[2], []]),
        (partial(functional.sparsemax, dim=0), [(12, 3)], [[0]]),
        (partial(functional.softmax, dim=0), [(12, 3)], [[0]]),
    ],
    ids=["tokens of causal_conv1d", "sparsemax", "softmax"],
)
def test_length_that_data_decides(fn: Callable[..., Any], shapes: list[tuple[int, ...]], axes: list[list[int]]) -> None:
    args = [torch.randn(shape) for shape in shapes]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = _compiled_for_some_rows(fn, axes, 12)
        torch.testing.assert_close(compiled(*args), fn(*args))


def test_python_functions_do_not_share_their_limit_of_recompilations() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with torch._dynamo.config.patch(recompile_limit=1):
        for fn in (functional.softmax, functional.sparsemax, functional.relu_squared):
            torch.compile(fn, backend="eager", fullgraph=True)(x)
