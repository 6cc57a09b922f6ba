"""Tests of derivatives under PyTorch's compiled autograd, and of the formulas that the registry makes and refuses."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from compile_tests.helpers.breadth import some_of
from llmk.accuracy.neighbours import copy_with_layout, to_float64
from llmk.accuracy.rule import accuracy_violation
from llmk.opcheck.inputs import as_list, differentiable_inputs, prepare
from llmk.registry import OPS, KernelOp, Op, Sample, no_gradient, replicate_only
from llmk.registry.private.tensors import FakeTensorMode

DIFFERENTIABLE = [name for name, op in OPS.items() if op.differentiable]


@pytest.mark.parametrize(
    "name", some_of(DIFFERENTIABLE, ("rms_norm", "rms_norm_linear", "rope", "fused_linear_ce", "sinkhorn"))
)
def test_a_compiler_of_autograd_traces_a_formula(name: str) -> None:
    """PyTorch's compiled autograd takes what was called in eager mode."""
    op = OPS[name]
    sample = next(s for s in op.samples(torch.device("cpu"), torch.float32) if s.args[0].numel() and "NaN" not in s.why)
    torch._dynamo.reset()
    compiler, found = partial(torch.compile, backend="eager"), []
    for compiled in (False, True):
        args, kwargs, tensors = prepare(op, sample, differentiable_inputs(op, sample))
        loss = sum(y.double().sin().sum() for y in as_list(op.overload(*args, **kwargs)) if y.requires_grad)
        with compiled_autograd._enable(compiler) if compiled else nullcontext():
            loss.backward()
        found.append([tensors[name].grad for name in differentiable_inputs(op, sample)])
    torch.testing.assert_close(*found)


def gradients_at_once(
    op: Op, sample: Sample, fn: Callable[..., Any], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> list[Tensor | None]:
    """Return the inputs' gradients `[3, ...]` for three gradients of the outputs, passed as one."""
    wanted = differentiable_inputs(op, sample)
    args, kwargs, tensors = prepare(op, sample, wanted, change)
    outputs = [y for y in as_list(fn(*args, **kwargs)) if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn((3, *y.shape), generator=generator, dtype=torch.float64).to(y) for y in outputs]
    inputs = [tensors[name] for name in wanted]
    return list(torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, allow_unused=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_several_gradients_at_once(name: str, device: torch.device) -> None:
    """PyTorch's `is_grads_batched`, of which `torch.autograd.functional.jacobian(vectorize=True)` is made."""
    op = OPS[name]
    sample = next(s for s in op.samples(device, torch.float32) if s.args[0].numel() and "NaN" not in s.why)
    found = gradients_at_once(op, sample, op.overload)
    composition = gradients_at_once(op, sample, op.reference)
    exact = gradients_at_once(op, sample, op.reference, to_float64)
    for actual, other, right in zip(found, composition, exact, strict=True):
        assert (actual is None) == (right is None)
        if actual is not None and other is not None and right is not None:
            assert accuracy_violation(actual, other, right) is None


def test_what_a_second_derivative_would_miss_is_refused() -> None:
    """A formula may keep more than inputs and outputs, or take an output out of the graph: both are refused."""

    def kernel(name: str, setup_context: Callable[..., None]) -> KernelOp:
        def fn(input: Tensor) -> tuple[Tensor, Tensor]:
            return input * 2, input + 1

        fn.__name__, fn.__module__ = name, "llmk.ops.test"
        op = KernelOp(fn)
        op.register_kernel("cpu")(fn)
        op.register_fake(lambda input: (torch.empty_like(input), torch.empty_like(input)))
        op.register_sharding(replicate_only)
        op.register_autograd(lambda ctx, grad: grad * 2, setup_context=setup_context)
        return op

    x = torch.randn(3, requires_grad=True)
    copied = kernel("_test_keeps_a_copy", lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].clone()))
    with pytest.raises(RuntimeError, match="_test_keeps_a_copy: save_for_backward takes the op's inputs and outputs"):
        copied.overload(x)
    marked = kernel("_test_marks", lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]))
    with pytest.raises(RuntimeError, match="_test_marks: depends_on says which outputs have no gradient"):
        marked.overload(x)
    _, kept = kernel("_test_kept_output", lambda ctx, inputs, output: None).overload(x)
    with pytest.raises(NotImplementedError, match="llmk::_test_kept_output: double backward is not supported"):
        kept.sum().backward()


def _scaled_product(name: str, formula: Callable[..., Any]) -> tuple[KernelOp, KernelOp]:
    """`input * weight * factor`, and `formula` as the op of its gradients."""

    def forward(input: Tensor, factor: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = torch.full((), factor, dtype=input.dtype, device=input.device)
        return input * factor if weight is None else input * weight * factor, scale

    ops = []
    for fn, ending in ((forward, "fwd"), (formula, "bwd")):
        fn.__name__, fn.__module__ = f"{name}_{ending}", "llmk.ops.test"
        op = KernelOp(fn)
        op.register_kernel("cpu")(fn)
        op.register_sharding(replicate_only)
        ops.append(op)
    forward_op, backward_op = ops
    forward_op.register_fake(lambda input: (input.new_empty(input.shape), input.new_empty(())))
    return forward_op, backward_op


def test_a_backward_op_is_given_what_its_arguments_are_named_after() -> None:
    seen = []

    def formula(
        grad: Tensor, scale: Tensor, weight: Tensor | None, need_weight: bool, factor: float, input: Tensor
    ) -> tuple[Tensor, Tensor]:
        seen.append((scale.item(), need_weight, factor))
        dx = grad * factor if weight is None else grad * weight * factor
        return dx, grad * input * factor if need_weight else no_gradient(grad)

    fwd, bwd = _scaled_product("_test_named", formula)
    fwd.register_backward(bwd, outputs=("output", "scale"))
    x, w, dy = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    for wanted in ((True, True), (True, False), (False, True)):
        a, b = (t.clone().requires_grad_(needs) for t, needs in zip((x, w), wanted, strict=True))
        for call in (fwd, fwd.overload):
            a.grad = b.grad = None
            call(a, 3.0, b)[0].backward(dy)
            assert seen.pop() == (3.0, wanted[1], 3.0)
            for grad, expected, needs in ((a.grad, 3 * dy * w, wanted[0]), (b.grad, 3 * dy * x, wanted[1])):
                assert (grad is not None) == needs
                assert grad is None or torch.allclose(grad, expected)
    a = x.clone().requires_grad_()
    fwd(a, 2.0, None)[0].backward(dy)
    assert a.grad is not None
    assert torch.equal(a.grad, 2 * dy)
    with FakeTensorMode():
        fake = [torch.empty(3, 2).t(), torch.empty((), dtype=torch.float64), torch.empty(3, dtype=torch.float16)]
        dx, dw = bwd.overload(torch.empty(2, 3), *fake[1:], True, 1.0, fake[0])
        assert (dx.shape, dx.is_contiguous(), dw.shape, dw.dtype) == ((2, 3), True, (3,), torch.float16)
        _, dw = bwd.overload(torch.empty(2, 3), *fake[1:], False, 1.0, fake[0])
        assert dw.shape == (0,)


def test_a_backward_op_is_given_none_for_what_it_does_not_need() -> None:
    """And it is not kept: the input is for the weight's gradient, the scale for a factor of 3."""
    seen = []

    def formula(
        grad: Tensor, scale: Tensor | None, input: Tensor | None, weight: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        seen.append((scale is not None, input is not None))
        return grad * weight * factor, no_gradient(grad) if input is None else grad * input * factor

    fwd, bwd = _scaled_product("_test_saved_if", formula)
    conditions: dict[str, Callable[..., bool]] = {
        "input": lambda need_weight: need_weight,
        "scale": lambda factor: factor == 3,
    }
    fwd.register_backward(bwd, outputs=("output", "scale"), saved_if=conditions)
    x, w, dy = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    for needs_dw, factor in ((True, 2.0), (False, 3.0)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_(needs_dw)
        for call in (fwd, fwd.overload):
            kept: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
                y, _ = call(a, factor, b)
            dx, *dw = torch.autograd.grad(y, [a, b] if needs_dw else [a], dy)
            assert seen.pop() == (not needs_dw, needs_dw)
            assert len(kept) == 2
            assert torch.allclose(dx, factor * dy * w)
            assert all(torch.allclose(g, factor * dy * x) for g in dw)
    for wrong in ({"inptu": lambda factor: True}, {"input": lambda fcator: True}):
        with pytest.raises(ValueError, match=r"_test_saved_if_bwd: expected|saves_input: no argument is called fcator"):
            fwd.register_backward(bwd, outputs=("output", "scale"), saved_if=wrong)


def test_a_backward_op_whose_arguments_are_nobodys_is_refused() -> None:
    def unknown(grad: Tensor, inptu: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad

    def too_few(grad: Tensor, input: Tensor) -> Tensor:
        return grad

    for i, formula in enumerate((unknown, too_few)):
        fwd, bwd = _scaled_product(f"_test_refused_{i}", formula)
        with pytest.raises(ValueError, match="expected the gradients of input, weight from arguments named after"):
            fwd.register_backward(bwd, outputs=("output", "scale"))
