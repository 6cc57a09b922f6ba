"""One token at a time: the steps of recurrences and of the convolution are the operators over whole sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.recurrences import REFERENCES, inputs, per_channel_or_head
from llmk import functional
from llmk.accuracy.rule import accuracy_violation
from llmk.ops.convolution.causal_conv1d import causal_conv1d_reference
from llmk.ops.convolution.causal_conv1d_step import causal_conv1d_step_reference
from llmk.ops.recurrence._naive import token_by_token
from llmk.registry import OPS


def stepped(step: Callable[..., Any], tokens: list[Tensor], state: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens `[B, T, ...]`, and the last state."""
    outs = []
    for token in zip(*(x.unbind(1) for x in tokens), strict=True):
        out, state = step(*token, state, **options)
        outs.append(out)
    return torch.stack(outs, 1), state


def with_gradients(fn: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all tensors through both of them."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, final = fn(*leaves)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x) for x in (out, final)]
    return [out.detach(), final.detach(), *torch.autograd.grad([out, final], leaves, weights)]


def check(actual: list[Tensor], baseline: list[Tensor], right: list[Tensor]) -> None:
    for i, (found, other, exact) in enumerate(zip(actual, baseline, right, strict=True)):
        violation = accuracy_violation(found, other, exact)
        assert violation is None, (i, violation)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@per_channel_or_head
def test_steps_are_the_chunks(name: str, dtype: torch.dtype, per_channel: bool, device: torch.device) -> None:
    """Values and states; the baseline is the reference over chunks. Gradients; that of the reference by steps.

    A gradient that goes back through 70 calls is rounded by each, where that over chunks is rounded once.
    """
    given = inputs(2, 70, 2, 4, 12, 20, dtype, device, per_channel=per_channel)
    given[3] = given[3].float()
    state = torch.linspace(-1, 1, 2 * 4 * 12 * 20, dtype=torch.float32, device=device).view(2, 4, 12, 20)
    options: dict[str, Any] = {"scale": 0.3} | ({"l2_norm_qk": True} if name == "gated_delta_rule" else {})
    given = given if name == "gated_delta_rule" else given[:-1]
    step = getattr(functional, f"{name}_step")
    actual = with_gradients(lambda *x: stepped(step, [*x[:-1]], x[-1], **options), [*given, state])

    def whole(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: fn(*x[:-1], initial_state=x[-1], **options)

    right = with_gradients(whole(token_by_token), [x.double() for x in (*given, state)])
    check(actual[:2], with_gradients(whole(REFERENCES[name]), [*given, state])[:2], right[:2])
    reference = OPS[f"{name}_step"].reference
    by_steps = with_gradients(lambda *x: stepped(reference, [*x[:-1]], x[-1], **options), [*given, state])
    check(actual[2:], by_steps[2:], right[2:])


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_do_not_grow_over_4096_steps(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Weak decays forget nothing for a thousand tokens."""
    given = inputs(1, 4096, 1, 2, 8, 8, dtype, device)
    given[3] = given[3].float() / 30
    given = given if name == "gated_delta_rule" else given[:-1]
    state, step = torch.zeros(1, 2, 8, 8, dtype=torch.float32, device=device), getattr(functional, f"{name}_step")
    options: dict[str, Any] = {"scale": 0.3} | ({"l2_norm_qk": True} if name == "gated_delta_rule" else {})
    with torch.no_grad():
        actual = stepped(step, given, state, **options)
        baseline = REFERENCES[name](*given, initial_state=state, **options)
        right = token_by_token(*(x.double() for x in given), initial_state=state.double(), **options)
    check([*actual], [*baseline], [*right])


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("longer", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_the_convolution(taps: int, longer: int, dtype: torch.dtype, device: torch.device) -> None:
    """The state has the taps before a token, or more, of which the last are read. Baselines as above."""
    generator = torch.Generator().manual_seed(taps)
    shapes = (2, 20, 6), (2, 6, taps - 1 + longer), (6, taps), (6,)
    given = [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes]

    def steps(operator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def fn(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return stepped(lambda t, state: operator(t, state, weight, bias, activation="silu"), [x], state)

        return fn

    def whole(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        before = state[..., longer:]
        out, _ = causal_conv1d_reference(x.mT, weight, bias, activation="silu", initial_state=before)
        return out.mT, torch.cat([state, x.mT], -1)[..., -state.shape[2] :]

    right = with_gradients(whole, [x.double() for x in given])
    actual = with_gradients(steps(functional.causal_conv1d_step), given)
    check(actual[:2], with_gradients(whole, given)[:2], right[:2])
    check(actual[2:], with_gradients(steps(causal_conv1d_step_reference), given)[2:], right[2:])
