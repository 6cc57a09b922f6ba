"""A call's arguments as one value: by name of a function, and as the schema of a kernel op."""

import inspect
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from llmk.registry import CallOp, FromArguments, from_arguments, replicate_only, with_arguments
from llmk.registry.private.operators import schema_of


class Slope(NamedTuple):
    factor: float = 2.0
    shift: int = 1


class Part(NamedTuple):
    first: int
    of: str


@dataclass(frozen=True, kw_only=True)
class Layer(FromArguments):
    scale: float
    input: Tensor
    slope: Slope
    part: Part | None = None

    def outputs(self) -> Tensor:
        return self.scale * self.slope.factor * self.input + self.slope.shift


@dataclass(frozen=True, kw_only=True)
class Call(Layer):
    bias: Tensor | None
    negative: bool = False


@with_arguments
def public(
    arguments: dict[str, Any], /,
    input: Tensor, bias: Tensor | None = None, *, scale: float = 1.0, shift: int = 1, factor: float = 2.0,
    of_no_call: str = "",
) -> Tensor:  # fmt: skip
    call = Call.of(arguments, negative=True)
    return -call.outputs() if call.negative and call.bias is None else call.outputs()


def test_fields_are_taken_by_name() -> None:
    x = torch.ones(2)
    call = Call.of({"shift": 3, "bias": None, "scale": 0.5, "input": x, "else": 1}, scale=4.0)
    assert (call.scale, call.slope, call.bias, call.negative, call.part) == (4.0, Slope(2.0, 3), None, False, None)
    assert call.input is x
    assert vars(Call.of(vars(call), negative=True)) == {**vars(call), "negative": True}
    assert from_arguments(Slope, {"shift": 2, "scale": 1}) == Slope(2.0, 2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'bias'"):
        Call.of({"scale": 1.0, "input": x})


def test_dynamo_traces_it() -> None:
    compiled = torch.compile(public, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 7):
        x = torch.randn(rows, 2, requires_grad=True)
        out = compiled(x, scale=0.5, shift=2)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, -x - 2)
        assert torch.equal(grad, -torch.ones_like(x))


@with_arguments
def handed_on(arguments: dict[str, Any], /, input: Tensor, scale: float = 2.0, *, shift: int = 1) -> dict[str, Any]:
    return {**arguments, "sum": (input * scale + shift).sum()}


def test_a_function_gets_its_arguments_by_name() -> None:
    x = torch.ones(2)
    assert str(inspect.signature(handed_on)).startswith("(input: torch.Tensor, scale: float = 2.0, *, shift: int = 1)")
    for given in (handed_on(x), handed_on(input=x), handed_on(x, 2.0, shift=1)):
        assert {name: value for name, value in given.items() if name != "sum"} == {"input": x, "scale": 2.0, "shift": 1}
        assert given["sum"] == 6
    for args, kwargs in [((), {}), ((x,), {"input": x}), ((x, 1.0, 2), {}), ((x,), {"unknown": 1})]:
        with pytest.raises(TypeError, match="handed_on"):
            handed_on(*args, **kwargs)


@pytest.fixture(scope="module")
def op() -> CallOp[Call]:
    """A kernel op that returns the outputs, with a number added, and a bias of zeros where it has none."""
    Call.__module__ = "llmk.ops.test"

    def run(call: Call, add: float) -> tuple[Tensor, Tensor]:
        bias = torch.zeros_like(call.input) if call.bias is None else call.bias.clone()
        return call.outputs() + (add if call.part is None else add + call.part.first), bias

    def fake(call: Call, add: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(call.input), torch.empty_like(call.input)

    def differentiate(ctx: Any, grad: Tensor, bias_grad: Tensor) -> Any:
        call, (bias,) = op.saved_call(ctx)
        dx = grad * call.scale * call.slope.factor
        return dx, None if call.bias is None else bias_grad + 0 * bias, *[None] * (op.fields - 1)

    op = CallOp("_test_call", Call, run, on_host=run, outputs=2, fake=fake, flops=lambda call, add: call.input.numel())
    op.op.register_autograd(
        differentiate,
        setup_context=lambda ctx, inputs, out: op.save_call(ctx, inputs, out[1]),
        depends_on=[["input"], ["bias"]],
    )
    op.op.register_sharding(replicate_only)
    op.op.complete()
    return op


def test_a_dataclass_is_a_schema(op: CallOp[Call]) -> None:
    """Tensors come first, then numbers as they are declared, and last those of a value that may be None."""
    assert str(schema_of(op.op.overload)) == (
        "llmk::_test_call(Tensor input, Tensor? bias, float scale, float factor, SymInt shift, bool negative, "
        "SymInt first, str of, float add) -> (Tensor, Tensor)"
    )


def test_an_op_gets_the_call_again(op: CallOp[Call]) -> None:
    x, bias = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    whole = Call(input=x, bias=bias, scale=0.5, slope=Slope(3.0, 2), negative=True)
    for call in (
        whole,
        replace(whole, bias=None),
        replace(whole, part=Part(0, "all")),
        replace(whole, part=Part(7, "")),
    ):
        out, second = op(call, 1.0)
        assert torch.equal(out, 1.5 * x + 3 + (0 if call.part is None else call.part.first))
        assert torch.equal(second, torch.zeros(3) if call.bias is None else bias)
        gradients = torch.autograd.grad(out.sum() + 2 * second.sum(), [x] if call.bias is None else [x, bias])
        assert [each.tolist() for each in gradients] == [[1.5] * 3, [2.0] * 3][: len(gradients)]
        again, add = op.unpack((x, call.bias, 0.5, 3.0, 2, True, *(call.part or (0, "")), 1.0))
        assert (vars(again), add) == (vars(call), 1.0)


def test_a_call_may_follow_other_arguments(op: CallOp[Call]) -> None:
    """The arguments begin with the incoming gradients in an op that `register_backward` gets."""

    def run(grad: Tensor, call: Call, need: bool) -> tuple[Tensor, Tensor]:
        return grad * call.scale, grad + need

    after = CallOp("_test_call_after", Call, run, on_host=run, outputs=2, fake=None, flops=lambda grad, call, need: 0)
    assert str(schema_of(after.op.overload)).startswith(
        "llmk::_test_call_after(Tensor grad, Tensor input, Tensor? bias,"
    )
    x = torch.randn(3)
    call = Call(input=x, bias=None, scale=0.5, slope=Slope(3.0, 2), part=Part(7, ""))
    grad, again, need = after.unpack((x, x, None, 0.5, 3.0, 2, False, 7, "", True))
    assert grad is x
    assert (vars(again), need) == (vars(call), True)
    first, second = after(x, call, True)
    assert torch.equal(first, 0.5 * x)
    assert torch.equal(second, x + 1)
