"""`gradient_of` in the body of an operator, on each way that a call takes, and what a caller has switched on or off."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.registry import KernelOp, differentiating, gradient_of, replicate_only, set_short_path_enabled
from llmk.registry.private import modes


def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of weight * sin(x)^2, and its gradient by x; the weight is captured."""
    value, (grad, unused) = gradient_of(lambda x, _: (weight * x.sin().square()).sum(), x, weight)
    assert grad is not None
    assert unused is None
    assert not value.requires_grad
    return value, grad


def fake(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(()), x.new_empty(x.shape)


def kernel_op(name: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def launch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return body(x, weight)

    launch.__name__, launch.__module__ = name, "llmk.ops.test"
    op = KernelOp(launch, **options)
    op.register_kernel("cpu")(differentiating(launch))
    op.register_fake(fake)
    op.register_sharding(replicate_only)
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
        depends_on=[["x"]],
    )
    return op


library = torch.library.Library("llmk_test_gradient", "DEF")
library.define("composite(Tensor x, Tensor weight) -> (Tensor, Tensor)")
library.impl("composite", body, "CompositeExplicitAutograd")
library_op = torch.ops.llmk_test_gradient.composite.default


INLINED, OPAQUE = kernel_op("_test_gradient_inlined"), kernel_op("_test_gradient_opaque", opaque=True)


def given() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(7, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, weight, weight * (2 * x).sin()


def require_right(fn: Callable[..., tuple[Tensor, Tensor]], change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    x, weight, right = given()
    value, grad = fn(change(x), change(weight))
    torch.testing.assert_close(grad, right)
    torch.testing.assert_close(value, (weight * x.sin().square()).sum())


@pytest.fixture(params=[True, False], ids=["fast path", "dispatcher"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with set_short_path_enabled(request.param):
        yield


@pytest.mark.parametrize("op", [INLINED, OPAQUE], ids=["inlined", "opaque"])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu")])
@pytest.mark.parametrize("made_in", [nullcontext, torch.inference_mode])
def test_modes(path: None, op: Any, mode: Any, made_in: Any) -> None:
    """The gradients are right in each mode of the caller, and wherever the tensors were made."""

    def made(x: Tensor) -> Tensor:
        with made_in():
            return x.clone()

    with mode():
        require_right(op, made)


@pytest.mark.parametrize("op", [INLINED, OPAQUE], ids=["inlined", "opaque"])
def test_a_caller_differentiates(path: None, op: Any) -> None:
    x, weight, right = given()
    x.requires_grad_()
    weight.requires_grad_()
    (3 * op(x, weight)[0]).backward()
    torch.testing.assert_close(x.grad, 3 * right)
    assert weight.grad is None


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", [INLINED, OPAQUE], ids=["inlined", "opaque"])
def test_compiled(op: Any, backend: str) -> None:
    def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
        value, grad = op.overload(*args)
        return value, grad.detach()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    require_right(compiled)
    x, weight, right = given()
    compiled(x.requires_grad_(), weight)[0].backward()
    torch.testing.assert_close(x.grad, right)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_composite_operator(requires_grad: bool) -> None:
    """PyTorch's own registration for every device, which excludes autograd's keys where an input wants a gradient."""
    require_right(library_op, lambda x: x.clone().requires_grad_(requires_grad))


@pytest.mark.parametrize("op", [INLINED, OPAQUE, library_op], ids=["inlined", "opaque", "composite"])
def test_hooks_on_saved_tensors_see_none_of_it(path: None, op: Any) -> None:
    called: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        called.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, note):
        require_right(op)
    assert called == []


def test_without_the_name_that_hooks_are_switched_off_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_set_hooks_tracing", None)
    test_hooks_on_saved_tensors_see_none_of_it(None, INLINED)


def test_a_value_that_depends_on_nothing() -> None:
    x, weight, _ = given()
    value, grads = gradient_of(lambda x: weight.sum(), x)
    assert torch.equal(value, weight.sum())
    assert grads == (None,)


def test_captured_tensors_are_constants() -> None:
    """They get no gradient, and the gradients that are found have no graph."""
    x, weight, right = given()
    weight.requires_grad_()
    value, (grad,) = gradient_of(lambda x: (weight.detach() * x.sin().square()).sum(), x.requires_grad_())
    assert grad is not None
    assert not value.requires_grad
    assert not grad.requires_grad
    assert x.grad is None
    torch.testing.assert_close(grad, right.detach())


def test_gradients_are_contiguous() -> None:
    x = torch.ones(3, 4)
    for fn in (torch.Tensor.sum, lambda x: x.t().contiguous().view(-1)[:5].sum()):
        _, (grad,) = gradient_of(fn, x)
        assert grad is not None
        assert grad.is_contiguous()
