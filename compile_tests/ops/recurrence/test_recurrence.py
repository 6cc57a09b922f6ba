"""The linear recurrences against the recurrence itself, token by token in float64, and what follows from it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.recurrences import REFERENCES, Results, inputs, per_channel_or_head
from llmk.accuracy.rule import accuracy_violation
from llmk.functional import gated_delta_rule, gated_linear_attention
from llmk.ops.recurrence import _chunk_launches
from llmk.ops.recurrence._naive import token_by_token
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET, runs_kernels


def gradients(fn: Callable[..., Results], tensors: list[Tensor], state: Tensor, **options: Any) -> list[Tensor]:
    """Outputs and the gradients of all inputs, through both outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, state)]
    out, final = fn(*leaves[:-1], initial_state=leaves[-1], **options)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x) for x in (out, final)]
    return [out, final, *torch.autograd.grad([out, final], leaves, weights)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("T", [1, 64, 150])
@per_channel_or_head
def test_the_chunks_are_the_recurrence(name: str, T: int, packed: bool, per_channel: bool) -> None:
    cpu = torch.device("cpu")
    tensors = inputs(2, T, 2, 4, 6, 5, torch.float64, cpu, per_channel=per_channel)
    state = torch.linspace(-1, 1, 2 * 4 * 6 * 5, dtype=torch.float64, device=cpu).view(2, 4, 6, 5)
    options: dict[str, Any] = {"scale": 0.3}
    if packed:
        options["sequence_ids"] = (torch.arange(T, device=cpu) // 37).expand(2, T)
    if name == "gated_delta_rule":
        options["l2_norm_qk"] = not packed
    else:
        tensors = tensors[:-1]
    right = gradients(token_by_token, tensors, state, **options)
    for found, expected in zip(gradients(REFERENCES[name], tensors, state, **options), right, strict=True):
        torch.testing.assert_close(found, expected)


def require_right(name: str, given: list[Tensor], state: Tensor, **options: Any) -> None:
    """Compare outputs and gradients with the recurrence in float64 by the rule."""

    def double(fn: Callable[..., Results]) -> list[Tensor]:
        return gradients(fn, [x.double() for x in given], state.double(), **options)

    exact = double(token_by_token)
    baseline = gradients(REFERENCES[name], given, state, **options)
    found = gradients(OPS[name].function, given, state, **options)
    for i, (actual, right, other) in enumerate(zip(found, exact, baseline, strict=True)):
        violation = accuracy_violation(actual, other, right)
        assert violation is None, (i, violation)


@pytest.mark.kernels
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@per_channel_or_head
def test_the_operators_are_the_recurrence(
    name: str, dtype: torch.dtype, per_channel: bool, device: torch.device
) -> None:
    """The decays beside each other have very different strengths, of key heads that are shared."""
    given = inputs(1, 70, 1, 2, 12, 20, dtype, device, per_channel=per_channel)
    given[3] = given[3].float()
    state = torch.linspace(-1, 1, 2 * 12 * 20, dtype=torch.float32, device=device).view(1, 2, 12, 20)
    ids = (torch.arange(70, device=device) // 37)[None]
    options: dict[str, Any] = {"scale": 0.3, "sequence_ids": ids}
    if name == "gated_delta_rule":
        options["l2_norm_qk"] = True
    else:
        given = given[:-1]
    require_right(name, given, state, **options)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_value_heads_that_a_program_makes_together(dtype: torch.dtype, device: torch.device) -> None:
    """All four of a key head, in batches and chunks."""
    given = inputs(2, 70, 1, 4, 12, 20, dtype, device)[:-1]
    given[3] = given[3].float()
    state = torch.linspace(-1, 1, 2 * 4 * 12 * 20, dtype=torch.float32, device=device).view(2, 4, 12, 20)
    ids = (torch.arange(70, device=device) // 50).expand(2, 70)
    require_right("gated_linear_attention", given, state, sequence_ids=ids)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@per_channel_or_head
def test_a_sequence_in_two_calls(dtype: torch.dtype, per_channel: bool, device: torch.device) -> None:
    """The final state of the first is the initial state of the second."""
    tensors = inputs(1, 70, 1, 2, 8, 8, dtype, device, per_channel=per_channel)
    out, final = gated_delta_rule(*tensors)
    first, state = gated_delta_rule(*(x[:, :64] for x in tensors))
    second, last = gated_delta_rule(*(x[:, 64:] for x in tensors), initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), out)
    torch.testing.assert_close(last, final)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@per_channel_or_head
def test_a_decay_of_zero_is_the_beginning_of_a_sequence(
    dtype: torch.dtype, per_channel: bool, device: torch.device
) -> None:
    """Also where the log decay is -inf, forward and backward."""
    tensors = inputs(1, 70, 1, 2, 8, 8, dtype, device, per_channel=per_channel)
    ids = torch.zeros(1, 70, dtype=torch.int32, device=device)
    ids[:, 20:], ids[:, 64:] = 1, 2
    begun = [x.clone() for x in tensors]
    begun[3][:, [20, 64]] = -math.inf
    state = torch.ones(1, 2, 8, 8, dtype=torch.float32, device=device)
    packed = gradients(gated_delta_rule, tensors, state, sequence_ids=ids)
    for i, (found, expected) in enumerate(zip(gradients(gated_delta_rule, begun, state), packed, strict=True)):
        assert bool(found.isfinite().all()), i
        torch.testing.assert_close(found, expected)


@pytest.mark.kernels
@per_channel_or_head
def test_sequences_leave_each_other_alone(per_channel: bool, device: torch.device) -> None:
    """One sequence changes no bit of another's results: NaN in the first does not reach the second."""
    q, k, v, g, _ = inputs(1, 70, 1, 2, 8, 8, torch.float32, device, per_channel=per_channel)
    ids = (torch.arange(70, device=device) // 40)[None]
    clean, _ = gated_linear_attention(q, k, v, g, sequence_ids=ids)
    other = v.clone()
    other[:, :40] = 1e30
    changed, _ = gated_linear_attention(q, k, other, g, sequence_ids=ids)
    torch.testing.assert_close(changed[:, 40:], clean[:, 40:], rtol=0, atol=0)


@pytest.mark.kernels
@per_channel_or_head
def test_what_overflows_between_two_sequences_is_in_no_gradient(per_channel: bool, device: torch.device) -> None:
    """A product of one's state and another's gradient leaves float32: there the decay is 0, and they have no part."""
    T, K = 150, 8
    q, k, v, w = (torch.randn(1, T, 1, K, device=device) for _ in range(4))
    begins = torch.arange(T, device=device) >= 90
    v[:, ~begins] *= 1e25
    w[:, begins] *= 1e25
    g = -torch.rand((1, T, 1, K) if per_channel else (1, T, 1), device=device) / 8
    beta, ids = torch.rand(1, T, 1, device=device), begins.long().unsqueeze(0)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    out, _ = gated_delta_rule(q, k, v, g, beta, sequence_ids=ids, l2_norm_qk=True)
    for gradient in torch.autograd.grad((out * torch.where(begins[:, None, None], w, 1e-25)).sum(), inputs):
        assert gradient.isfinite().all()


@pytest.mark.kernels
@pytest.mark.parametrize("name", REFERENCES)
@per_channel_or_head
def test_the_first_decay_of_a_sequence_has_no_gradient(name: str, per_channel: bool, device: torch.device) -> None:
    """There is no state that it multiplies, whatever comes in."""
    *tensors, beta = inputs(1, 70, 1, 2, 8, 8, torch.float32, device, per_channel=per_channel)
    ids = torch.zeros(1, 70, dtype=torch.int32, device=device)
    ids[:, 20:], ids[:, 64:] = 1, 2  # within a chunk, and where one begins
    leaves = [x.requires_grad_() for x in ([*tensors, beta] if name == "gated_delta_rule" else tensors)]
    out, final = OPS[name].function(*leaves, sequence_ids=ids)
    for value in (math.inf, math.nan):
        incoming = [torch.full_like(x, value) for x in (out, final)]
        (dg,) = torch.autograd.grad((out, final), leaves[3], incoming, retain_graph=True)
        assert not dg[:, [20, 64]].any()
        assert not dg[:, 1:20].isfinite().any()


def test_a_positive_log_decay_is_named_on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU nothing waits for the device to say what g is")
    tensors = inputs(1, 3, 1, 1, 4, 4, torch.float32, device)
    tensors[3][0, 1] = 0.5
    with pytest.raises(ValueError, match=r"g: expected log decays of at most 0, got 0\.5"):
        gated_delta_rule(*tensors)


@pytest.mark.kernels
@pytest.mark.parametrize("name", REFERENCES)
@per_channel_or_head
def test_matrices_are_kept_where_gradients_are_wanted(name: str, per_channel: bool, device: torch.device) -> None:
    """The two chunks keep T with a correction, and with a decay for each channel P and, with a correction, K K^T."""
    tensors = inputs(1, 70, 1, 2, 8, 8, torch.bfloat16, device, per_channel=per_channel)
    corrected = name == "gated_delta_rule"
    leaves = [x.requires_grad_() for x in (tensors if corrected else tensors[:-1])]
    forward = getattr(torch.ops.llmk, f"_{name}_fwd").default
    chunks = 2 if runs_kernels(name, leaves[0]) else 0
    wanted = [corrected, per_channel, corrected and per_channel]
    for keep in (False, True):
        given = [*(x.detach() for x in leaves), *[None] * (5 - len(leaves))]
        _, _, *kept = forward(*given, None, None, 0.3, False, keep)
        assert [matrix.shape[2] for matrix in kept] == [chunks * (keep and each) for each in wanted]
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        OPS[name].function(*leaves)
    assert [shape[2] for shape in saved if len(shape) == 5] == [chunks * each for each in wanted]


@pytest.mark.kernels
def test_gradients_of_shared_keys_have_the_same_bits_in_any_batch(device: torch.device) -> None:
    """Value heads of one key head are summed in an order that the number of sequences has no part in."""
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("PyTorch's own sums on a CPU depend on the number of rows; the interpreter runs the kernels")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 20, 1, 8, generator=generator).to(device) for _ in range(2))
    v = torch.randn(4, 20, 4, 8, generator=generator).to(device)
    g = -torch.rand(4, 20, 4, generator=generator).to(device)

    def grads(rows: slice) -> list[Tensor]:
        inputs = [x[rows].clone().requires_grad_() for x in (q, k, v, g)]
        out = gated_linear_attention(*inputs)[0]
        return [grad[0] for grad in torch.autograd.grad(out.square().sum(), inputs)]

    for alone, among in zip(grads(slice(0, 1)), grads(slice(0, 4)), strict=True):
        assert torch.equal(alone, among)


@pytest.mark.kernels
@pytest.mark.parametrize("corrected", [True, False], ids=["delta", "linear"])
def test_outputs_have_the_same_bits_from_the_walk_and_apart(
    corrected: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of sequences decides which kernel makes them."""
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("plain PyTorch makes them in one way; the interpreter runs the kernels")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 70, 1, 12, generator=generator).to(device) for _ in range(2))
    v = torch.randn(2, 70, 2, 12, generator=generator).to(device)
    g, beta = (torch.rand(2, 70, 2, generator=generator).to(device) for _ in range(2))

    def out(from_the_walk: bool) -> Tensor:
        monkeypatch.setattr(_chunk_launches, "_makes_outputs", lambda x: from_the_walk)
        return (gated_delta_rule(q, k / 4, v, -g, beta) if corrected else gated_linear_attention(q, k, v, -g))[0]

    assert torch.equal(out(True), out(False))
