"""Tests of `rms_norm` and `add_rms_norm` beyond opcheck's samples: rows at two distances, and missing gradients."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.helpers.right_calls import require_call
from compile_tests.helpers.stub_driver import generated_code, launches, steps, stub_driver, trace
from llmk.functional import add_rms_norm, rms_norm
from llmk.opcheck.calls import call, incoming_gradients, require_accurate
from llmk.ops.common.rows import strided_rows
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET
from llmk.registry.graphs import ops_in_graph_as
from llmk.registry.launch import record_launches

on_gpu = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels run as opaque nodes, on no device")


def packed_heads(x: Tensor) -> Tensor:
    """The values of `[B, S, H, D]` among those of a packed projection, H heads on either side of them."""
    B, S, H, D = x.shape
    packed = torch.zeros(B, S, 3 * H * D, dtype=x.dtype, device=x.device)
    return packed[..., H * D : 2 * H * D].view(x.shape).copy_(x.detach())


def rows_apart(x: Tensor) -> Tensor:
    """The values of `[..., N]`, each row followed by N other values."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x.detach())


LAYOUTS = {
    "contiguous": (torch.empty(2, 3, 4, 8), (8, None, None)),
    "one row": (torch.empty(8), (8, None, None)),
    "rows apart": (rows_apart(torch.empty(2, 3, 4, 8)), (16, None, None)),
    "one of the rows apart": (rows_apart(torch.empty(5, 8))[2:3], (16, None, None)),
    "packed heads": (packed_heads(torch.empty(2, 3, 4, 8)), (96, 4, 8)),
    "packed heads of one token": (packed_heads(torch.empty(1, 1, 4, 8)), (8, None, None)),
    "one packed head": (packed_heads(torch.empty(2, 3, 1, 8)), (24, None, None)),
    "tokens before batch": (torch.empty(3, 2, 8).transpose(0, 1), (8, 3, 16)),
    "heads before tokens, one sequence": (torch.empty(1, 4, 3, 8).transpose(1, 2), (8, 4, 24)),
    "every row four times": (torch.empty(3, 1, 8).expand(3, 4, 8), (8, 4, 0)),
}
COPIED = {
    "columns apart": torch.empty(2, 3, 8)[..., ::2],
    "one value for all columns": torch.empty(2, 3, 1).expand(2, 3, 8),
    "heads before tokens": torch.empty(2, 4, 3, 8).transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_found_where_they_are(layout: str) -> None:
    x, expected = LAYOUTS[layout]
    rows, (stride, inner, inner_stride) = strided_rows(x)
    assert rows is x
    assert (stride, inner, inner_stride) == expected
    offsets = torch.arange(x.untyped_storage().nbytes() // 4)
    wanted = offsets.as_strided(x.shape, x.stride(), x.storage_offset()).reshape(-1, 8)[:, 0]
    row = torch.arange(x.numel() // 8)
    assert stride is not None
    starts = row * stride
    if inner is not None and inner_stride is not None:
        starts = row // inner * stride + row % inner * inner_stride
    assert (x.storage_offset() + starts).equal(wanted)


@pytest.mark.parametrize("layout", COPIED)
def test_other_layouts_are_copied(layout: str) -> None:
    rows, strides = strided_rows(COPIED[layout])
    assert rows.is_contiguous()
    assert strides == (rows.shape[-1], None, None)


@pytest.mark.kernels
@pytest.mark.parametrize("layout", [packed_heads, rows_apart])
@pytest.mark.parametrize(("name", "N"), [("rms_norm", 8), ("rms_norm", 40_000), ("add_rms_norm", 8)])
def test_gradients_at_two_distances(name: str, N: int, layout, device: torch.device) -> None:
    x, weight = torch.randn(2, 3, 4 if N < 100 else 2, N, device=device), torch.randn(N, device=device)
    inputs = (packed_heads(x), weight) if name == "rms_norm" else (packed_heads(x), rows_apart(x.flip(0)), weight)

    def grads(outputs):
        return [layout(grad) for grad in incoming_gradients(outputs)]

    sample = Sample(inputs, why="heads of a packed projection")
    require_call(OPS[name], sample, grads=grads)


def queries(qkv: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """A loss whose gradient reaches the normalized queries as heads of a packed tensor."""
    q = rms_norm(qkv[..., :32].view(2, 24, 4, 8), weight)
    return (q * grad).sum()


def test_kernels_are_launched_on_the_packed_projection() -> None:
    with FakeTensorMode(), record_launches() as recorded:
        x, weight = packed_heads(torch.empty(2, 3, 4, 8)), torch.empty(8)
        grad = packed_heads(torch.empty(2, 3, 4, 8))
        rms_norm(x.requires_grad_(), weight.requires_grad_()).backward(grad)
        forward, backward, _ = recorded
        for launch, names in [(forward, {"x": x}), (backward, {"h": x, "dy": grad})]:
            arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
            for name, tensor in names.items():
                assert arguments[f"{name}_ptr"].untyped_storage() is tensor.untyped_storage()
                assert arguments[f"{name}_ptr"].storage_offset() == tensor.storage_offset()
                assert [arguments[f"{name}_{s}"] for s in ("stride", "inner", "inner_stride")] == [96, 4, 8]


@on_gpu
def test_compiled_queries_are_normalized_without_a_copy() -> None:
    args = (
        torch.randn(2, 24, 80, requires_grad=True),
        torch.randn(8, requires_grad=True),
        packed_heads(torch.randn(2, 24, 4, 8)),
    )
    with stub_driver(), ops_in_graph_as({"_rms_norm_fwd": "kernel"}):
        graphs = trace(queries, *args)
        forward, _ = generated_code(queries, *args)
    for graph in [*graphs.forward, *graphs.backward]:
        assert not [line for line in steps(graph) if line.startswith(("aten.clone", "aten.copy"))]
    (launched,) = launches(graphs.forward[0])
    assert [launched.arguments.get(f"x_{s}") for s in ("stride", "inner", "inner_stride")] == [80, 4, 8]
    call = next(line for line in forward.splitlines() if "rms_norm_kernel_0.run(" in line)
    assert "reinterpret_tensor(primals_1, (2, 24, 4, 8), (1920, 80, 8, 1), 0)" in call


@on_gpu
def test_more_tokens_of_a_packed_projection_take_no_new_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(rms_norm, backend=counter, fullgraph=True)
    with stub_driver():
        for B, S in [(2, 24), (3, 33), (5, 7), (4, 130)]:
            x, weight = packed_heads(torch.randn(B, S, 4, 8)), torch.randn(8, requires_grad=True)
            fn(x.requires_grad_(), weight).backward(packed_heads(torch.randn(B, S, 4, 8)))
    assert counter.frame_count == 2


def require_accurate_within(around: Callable[..., Any], *inputs: Tensor) -> None:
    """The accuracy rule for `around(add_rms_norm, *inputs)`."""
    op, sample = OPS["add_rms_norm"], Sample(inputs, why="within other operations")
    within = replace(op, reference=functools.partial(around, op.reference))
    require_accurate(within, sample, call(op, sample, fn=functools.partial(around, add_rms_norm)))


@pytest.mark.parametrize("given", [(0,), (1,), (0, 1)])
def test_input_and_residual_get_memory_of_their_own(given: tuple[int, ...], device: torch.device) -> None:
    """The formula hands one tensor to both; what users find in `.grad` is theirs to change."""
    leaves = [torch.randn(5, 24, device=device, requires_grad=True) for _ in range(2)]
    inner = [leaf * 1 for leaf in leaves]
    for tensor in inner:
        tensor.retain_grad()
    grads = [torch.randn(5, 24, device=device) for _ in given]
    for input, residual in (leaves, inner):
        outputs = add_rms_norm(input, residual)
        torch.autograd.backward([outputs[i] for i in given], grads)
    found = [*grads, *(tensor.grad for tensor in (*leaves, *inner))]
    for a, b in itertools.combinations(found, 2):
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_adding_up_one_gradient_leaves_the_other_alone(device: torch.device) -> None:
    """Autograd adds a second gradient of the residual to the first, in place where it can."""

    def shared_residual(fn: Callable[..., Any], input: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        shared = residual * 1
        return *fn(input * 1, shared), shared

    require_accurate_within(shared_residual, *(torch.randn(5, 24, device=device) for _ in range(2)))


@on_gpu
@pytest.mark.parametrize("form", ["kernel", "aten"])
def test_compiled_step_launches_one_kernel_at_most(form: str) -> None:
    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, h = add_rms_norm(torch.sin(x), residual, weight)
        return (y * torch.cos(h)).sum()

    args = [torch.randn(2, 24, 64, requires_grad=True), torch.randn(2, 24, 64, requires_grad=True), torch.randn(64)]
    with stub_driver(), ops_in_graph_as({"_add_rms_norm_fwd": form}):
        graphs = trace(step, *args)
    assert list(steps(graphs.forward[0])) == (["rms_norm_kernel[2, 1, 1]"] if form == "kernel" else [])
    assert list(steps(graphs.backward[0])) == ["rms_norm_backward_kernel[2, 1, 1]"]
