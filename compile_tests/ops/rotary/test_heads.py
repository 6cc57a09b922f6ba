"""The operators on heads of queries and keys: what a compiled graph launches and keeps, layouts, special values."""

from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from compile_tests.helpers.stub_driver import Graphs, launches, saved, stub_driver
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

NAMES = ("rope", "qk_norm_rope")
each_op = pytest.mark.parametrize("name", NAMES)
traced = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels run as opaque nodes, on no device")


def arguments(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Make q, k, qk_norm_rope's weights, cos and sin as projections give them."""
    q, k = (torch.randn(2, 6, H, 16, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for H in (4, 2))
    weights = [torch.randn(16, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    angles = [torch.randn(1, 6, 16, device=device, dtype=dtype) for _ in range(2)]
    return [q, k, *(weights if name == "qk_norm_rope" else []), *angles]


def trace_alone(name: str, args: list[Tensor], **options: Any) -> Graphs:
    """The graphs of the operator compiled alone, so that its results and their gradients cross the graph's edge."""
    graphs = Graphs()

    def keep(into: list[Any]) -> Any:
        return lambda graph, inputs: into.append(graph) or make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep(graphs.forward),
        bw_compiler=keep(graphs.backward),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    overload = OPS[name].overload
    with stub_driver(), torch._functorch.config.patch(guess_tangent_strides_as_outputs=True):
        outputs = torch.compile(lambda *args: overload(*args), backend=backend, fullgraph=True, **options)(*args)
        torch.autograd.grad(outputs, [arg for arg in args if arg.requires_grad], [torch.ones_like(y) for y in outputs])
    return graphs


@traced
@each_op
def test_gradients_enter_a_graph_as_the_results_leave_it(name: str) -> None:
    """AOTAutograd copies a gradient that lies otherwise than the traced one did."""
    graphs = trace_alone(name, arguments(name))
    (backward,) = graphs.backward
    tangents = [node for node in backward.graph.nodes if node.op == "placeholder" and "tangents" in node.name]
    assert [node.meta["val"].stride() for node in tangents] == [(6 * H * 16, 16, H * 16, 1) for H in (4, 2)]
    for graph in (*graphs.forward, *graphs.backward):
        assert not [node for node in graph.graph.nodes if "clone" in str(node.target) or "copy" in str(node.target)]


@traced
def test_only_inputs_are_kept_for_the_backward_pass() -> None:
    graphs = trace_alone("qk_norm_rope", arguments("qk_norm_rope"))
    assert {node.op for node in saved(graphs)} == {"placeholder"}
    (forward,), (backward,) = graphs.forward, graphs.backward
    assert [launched.name for launched in launches(forward)] == ["qk_norm_rope_kernel"]
    names = ["qk_norm_rope_backward_kernel", "sum_two_partials_kernel"]
    assert [launched.name for launched in launches(backward)] == names


@traced
def test_frozen_weights_get_no_partials() -> None:
    args = [arg.requires_grad_(arg.dim() == 4) for arg in arguments("qk_norm_rope")]
    (backward,) = trace_alone("qk_norm_rope", args).backward
    (launched,) = launches(backward)
    assert launched.name == "qk_norm_rope_backward_kernel"
    assert launched.cloned == ("dq_ptr", "dk_ptr")


@pytest.mark.kernels
@each_op
def test_results_lie_as_projections_write(name: str, device: torch.device) -> None:
    args = arguments(name, device)
    outputs = OPS[name].overload(*args)
    grads = torch.autograd.grad(outputs, args[:2], [torch.randn_like(y).contiguous() for y in outputs])
    for tensor in (*outputs, *grads):
        assert tensor.transpose(1, 2).is_contiguous()


@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each_op
def test_keys_whose_result_gets_no_gradient_get_none(name: str, compiled: bool, device: torch.device) -> None:
    """An optimizer changes a parameter whose gradient is zeros, by weight decay or momentum, as in PyTorch."""
    args, overload = arguments(name, device, torch.float32), OPS[name].overload

    def queries(*args: Tensor) -> Tensor:
        return overload(*args)[0]

    fn = torch.compile(queries, backend="aot_eager") if compiled else queries
    fn(*args).sum().backward()
    with_gradient = [arg.grad is not None for arg in args]
    assert with_gradient == ([True, False, True, False] if len(args) == 6 else [True, False]) + [False, False]


@pytest.mark.kernels
@each_op
def test_no_heads(name: str, device: torch.device) -> None:
    q, k, *rest = arguments(name, device)
    yq, yk = OPS[name].overload(q[:, :0], k[:, :0], *rest)
    assert yq.shape == yk.shape == (2, 0, 6, 16)


@pytest.mark.kernels
@each_op
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("interleaved", [False, True])
def test_nan_and_inf_go_where_pytorch_puts_them(name: str, special: float, interleaved: bool, device) -> None:
    """A value among those that turn, in one head, and one among those that pass, in another."""
    args = arguments(name, device, torch.float32)
    args[-2:] = [angle[..., :8].contiguous() for angle in args[-2:]]
    with torch.no_grad():
        args[0][0, 1, 2, 3] = special
        args[0][1, 0, 4, 13] = special
    op = OPS[name]
    for ours, theirs in zip(*(fn(*args, interleaved=interleaved) for fn in (op.overload, op.reference)), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@each_op
def test_a_head_too_large_is_refused(name: str) -> None:
    q = torch.empty(1, 1, 1, 4096)
    weights = [torch.empty(4096)] * 2 if name == "qk_norm_rope" else []
    with pytest.raises(ValueError, match="q: expected at most 2048 features in a head, got 4096"):
        OPS[name].overload(q, q, *weights, torch.empty(1, 1, 64), torch.empty(1, 1, 64))


@pytest.mark.parametrize("shape", [(6, 16), (1, 6, 16)])
def test_heads_after_tokens_are_named(shape: tuple[int, ...]) -> None:
    """The fault is the layout of q, not the shape of cos."""
    q, angles = torch.randn(2, 6, 4, 16), torch.randn(shape)
    with pytest.raises(ValueError, match=r"^q: expected shape \[B, HQ, S, D\] with the 6 positions of cos"):
        torch.ops.llmk.rope(q, q, angles, angles)
