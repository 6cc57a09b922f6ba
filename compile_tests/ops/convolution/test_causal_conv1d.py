"""The causal convolution of packed sequences, of chunks and of lengths that change."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from llmk import functional
from llmk.accuracy.rule import accuracy_violation
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.kernels
D, K = 6, 4
each_layout = pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "channels first"])


def drawn(channels_last: bool, T: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and the gradient of the output, the same each time."""
    generator = torch.Generator().manual_seed(3)
    shapes = (1, T, D) if channels_last else (1, D, T), (D, K), (D,), (1, D, T)
    x, weight, bias, grad = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return x.transpose(1, 2) if channels_last else x, weight, bias, grad


def with_gradients(grad: Tensor, fn: Any, *args: Tensor, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of input, weight and bias."""
    args = tuple(arg.detach().requires_grad_() for arg in args)
    y, _ = fn(*args, activation="silu", **kwargs)
    return [y.detach(), *torch.autograd.grad(y, args, grad)]


def in_float64(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    args = (x.double(), weight.double(), bias.double())
    return with_gradients(grad.double(), OPS["causal_conv1d"].reference, *args)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN too; PyTorch's own exponentials on a CPU depend on where in memory a value lies."""
    if b.device.type == "cpu" and not INTERPRET:
        return torch.equal(a.isfinite(), b.isfinite())
    return torch.equal(a.nan_to_num(), b.nan_to_num())


@each_layout
def test_packed_sequences_are_as_they_are_alone(channels_last: bool, device: torch.device) -> None:
    """Numbers of one sequence that are not finite reach no other."""
    lengths = (30, 1, 2, 98, 5)
    x, weight, bias, grad = drawn(channels_last, sum(lengths), device)
    x[..., 31:33] = float("nan")
    ids = torch.cat([torch.full((1, n), i, device=device) for i, n in enumerate(lengths)], 1)
    y, dx, *_ = with_gradients(grad, functional.causal_conv1d, x, weight, bias, sequence_ids=ids)
    for i, (alone, grad_alone) in enumerate(zip(x.split(lengths, -1), grad.split(lengths, -1), strict=True)):
        want_y, want_dx, *_ = with_gradients(grad_alone, functional.causal_conv1d, alone, weight, bias)
        assert same(y[..., ids[0] == i], want_y)
        assert same(dx[..., ids[0] == i], want_dx)
        assert bool(want_y.isfinite().all()) == (i != 2)


def in_chunks(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    state, outputs = None, []
    for chunk in input.split([5, 2, 1, 29], -1):
        y, state = functional.causal_conv1d(chunk, *args, **kwargs, initial_state=state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, -1), state


@each_layout
def test_a_sequence_in_chunks(channels_last: bool, device: torch.device) -> None:
    """Chunks shorter than the taps too: the gradient of each goes through the states to those before it."""
    x, weight, bias, grad = drawn(channels_last, 37, device)
    reference = OPS["causal_conv1d"].reference
    got = with_gradients(grad, in_chunks, x, weight, bias)
    plain = with_gradients(grad, reference, x, weight, bias)
    for result in zip(got, plain, in_float64(x, weight, bias, grad), strict=True):
        assert accuracy_violation(*result) is None
    assert same(got[0], functional.causal_conv1d(x, weight, bias, activation="silu")[0])


@pytest.mark.skipif(INTERPRET, reason="what a compiler sees is the same: one node")
@each_layout
def test_other_lengths_do_not_compile_again(channels_last: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functional.causal_conv1d, fullgraph=True, backend=counter)
    for T in (9, 20, 5, 2):
        x, weight, bias, grad = drawn(channels_last, T, device)
        got = with_gradients(grad, compiled, x, weight, bias)
        plain = with_gradients(grad, OPS["causal_conv1d"].reference, x, weight, bias)
        for result in zip(got, plain, in_float64(x, weight, bias, grad), strict=True):
            assert accuracy_violation(*result) is None
        assert got[0].stride() == x.stride()
    assert counter.frame_count == 2  # of one length, and of any
