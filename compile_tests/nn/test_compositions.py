"""Modules that are plain PyTorch around our operators or none: values and gradients, eager and as one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmk
from llmk.opcheck import accuracy_violation

H, N = 20, 3


def layer(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def modulated(x: Tensor, scale: Tensor, shift: Tensor | None, *, weight: Tensor) -> Tensor:
    y = F.rms_norm(x, (H,), weight, 1e-6) * (1 + scale)
    return y if shift is None else y + shift


def over_depth(blocks: Tensor, *, query: Tensor, weight: Tensor) -> Tensor:
    keys = F.rms_norm(blocks, (H,), weight, 1e-6)
    return torch.einsum("nbs,nbsh->bsh", torch.einsum("h,nbsh->nbs", query, keys).softmax(0), blocks)


def hyper(x: Tensor, *, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    numbers = F.rms_norm(x.flatten(-2), (N * H,), None, 1e-6) @ fn.mT
    p, q = (torch.sigmoid(scale[i] * numbers[..., N * i : N * i + N] + base[N * i : N * i + N]) for i in range(2))
    logits = (scale[2] * numbers[..., 2 * N :] + base[2 * N :]).unflatten(-1, (N, N))
    mix = logits.softmax(-1) + 1e-6
    for turn in range(39):  # columns first and last
        mix = mix / (mix.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + 1e-6)
    read = torch.einsum("...i,...ih->...h", p + 1e-6, x)
    return torch.einsum("...j,...h->...jh", 2 * q, layer(read)) + torch.einsum("...ij,...ih->...jh", mix, x)


def mixed(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, above: int) -> Tensor:
    """Each place of the kernel by itself."""
    (_, _, queries, keys), S = weight.shape, x.shape[-1]
    padded = F.pad(x, (keys // 2, keys, above, queries)).unflatten(1, (groups, -1))
    kernel = weight.unflatten(0, (groups, -1))
    y = sum(
        torch.einsum("goc,bgcij->bgoij", kernel[..., a, b], padded[..., a : a + S, b : b + S])
        for a in range(queries)
        for b in range(keys)
    )
    y = torch.as_tensor(y).flatten(1, 2)
    return y if bias is None else y + bias.view(-1, 1, 1)


def multi_token(
    scores: Tensor, *, weight: Tensor, groups: int, above: int, before: bool, sparse: bool, bias: Tensor | None = None
) -> Tensor:
    past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    normalize = llmk.registry.OPS["sparsemax"].reference if sparse else torch.softmax
    if before:
        first = mixed(torch.where(past, scores, 0.0), weight, bias, groups, above)
        return normalize(torch.where(past, first, -float("inf")), -1)
    first = normalize(torch.where(past, scores, -float("inf")), -1)
    return torch.where(past, mixed(first, weight, bias, groups, above), 0.0)


def attention(*sizes: Any, above: int, groups: int = 1, **options: bool) -> tuple[Any, ...]:
    module = llmk.nn.MultiTokenAttention(*sizes, groups=groups, **options)
    before, sparse = options.get("before_softmax", False), options.get("sparse", False)

    def plain(scores: Tensor, **parameters: Tensor) -> Tensor:
        return multi_token(scores, **parameters, groups=groups, above=above, before=before, sparse=sparse)

    return module, plain, (torch.randn(2, sizes[0], 9, 9),)


def cases() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """A module, a function of its inputs and parameters that computes the same, and inputs.

    The softmax after a convolution takes away its bias, whose gradient is nothing but what was rounded.
    """
    x = torch.randn(2, 5, H)
    norm = lambda: llmk.nn.ModulatedRMSNorm(H, 1e-6)  # noqa: E731
    return {
        "modulated by sample": lambda: (
            norm(),
            lambda x, scale, shift, **w: modulated(x, scale[:, None], shift[:, None], **w),
            (x, torch.randn(2, H), torch.randn(2, H)),
        ),
        "modulated by token": lambda: (norm(), modulated, (x, torch.randn(2, 5, H), torch.randn(2, 1, H))),
        "modulated alike": lambda: (
            norm(),
            lambda x, scale, **w: modulated(x, scale, None, **w),
            (x, torch.randn(H)),
        ),
        "attention residual": lambda: (
            llmk.nn.AttentionResidual(H),
            over_depth,
            (torch.randn(4, 2, 5, H),),
        ),
        "hyper-connection": lambda: (
            _Around(llmk.nn.HyperConnection(H, N)),
            hyper,
            (torch.randn(2, 5, N, H),),
        ),
        "multi-token attention": lambda: attention(4, 6, (3, 4), above=2, groups=2),
        "multi-token attention, sparse, around": lambda: attention(2, 2, 3, above=1, sparse=True, causal=False),
        "multi-token attention, before": lambda: attention(2, 2, (2, 5), above=1, before_softmax=True, bias=False),
    }


class _Around(nn.Module):
    """A hyper-connection with its layer, and the connection's own names of parameters."""

    def __init__(self, connection: llmk.nn.HyperConnection) -> None:
        super().__init__()
        self.connection = connection
        for name, parameter in connection.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.connection(x, layer)


def results(function: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    y = function(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, [*inputs, *parameters], grad.to(y.dtype))]


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.breadth),
    ],
)
@pytest.mark.parametrize("name", cases())
def test_values_and_gradients(name: str, dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, plain, inputs = cases()[name]()
    parameters = {key: parameter for key, parameter in module.named_parameters() if "." not in key}
    for parameter in parameters.values():
        nn.init.normal_(parameter, std=0.5)
    module = module.to(dtype)
    function = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*inputs, *parameters.values())]
        own = dict(zip(parameters, leaves[len(inputs) :], strict=True))
        return results(lambda *x: function(*x, **own), leaves[: len(inputs)], list(own.values()))

    inputs = tuple(x.to(dtype) for x in inputs)
    parameters = {key: parameter for key, parameter in module.named_parameters() if "." not in key}
    leaves = [x.clone().requires_grad_() for x in inputs]
    got, own, exact = results(function, leaves, list(parameters.values())), run(plain, dtype), run(plain, torch.float64)
    for actual, composition, right in zip(got, own, exact, strict=True):
        assert actual.dtype == dtype
        assert (violation := accuracy_violation(actual, composition, right)) is None, str(violation)


def test_hyper_connection_is_hugging_faces() -> None:
    modeling = "transformers.models.deepseek_v4.modeling_deepseek_v4"
    deepseek = pytest.importorskip(modeling, exc_type=ImportError)
    config = deepseek.DeepseekV4Config(hidden_size=H, hc_mult=N, rms_norm_eps=1e-6)
    theirs, ours = deepseek.DeepseekV4HyperConnection(config), llmk.nn.HyperConnection(H, N)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, N, H)
    post, mix, collapsed = theirs(x)
    expected = post.unsqueeze(-1) * layer(collapsed).unsqueeze(-2) + mix.mT @ x
    exact = hyper(x.double(), **{name: parameter.double() for name, parameter in theirs.named_parameters()})
    assert (violation := accuracy_violation(ours(x, layer), expected, exact)) is None, str(violation)


def test_a_new_module_changes_little() -> None:
    """The modules begin as their papers say: attention as it was, a mean over depth, streams that stay as many."""
    scores = torch.randn(2, 4, 6, 6)
    causal = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -float("inf")).softmax(-1)
    for before in (False, True):
        for around in (False, True):
            same = llmk.nn.MultiTokenAttention(4, 4, 3, 2, before_softmax=before, causal=not around)
            torch.testing.assert_close(same(scores), causal)
    blocks = torch.randn(3, 2, H)
    torch.testing.assert_close(llmk.nn.AttentionResidual(H)(blocks), blocks.mean(0))
    torch.testing.assert_close(llmk.nn.AttentionResidual(H)(list(blocks)), blocks.mean(0))


def test_a_causal_kernel_sees_no_later_query() -> None:
    module = llmk.nn.MultiTokenAttention(1, 1, (3, 5))
    nn.init.normal_(module.weight)
    scores = torch.randn(1, 1, 7, 7)
    changed = scores.clone()
    changed[..., 4:, :] += 1.0
    assert torch.equal(module(scores)[..., :4, :], module(changed)[..., :4, :])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llmk.nn.ModulatedRMSNorm(8)(torch.ones(2, 3, 8), torch.ones(3, 8)), r"scale: .*, got \(3, 8\)"),
        (
            lambda: llmk.nn.ModulatedRMSNorm(8)(torch.ones(2, 3, 8), torch.ones(8), torch.ones(2, 3, 1)),
            r"shift: expected shape \[8\], \[2, 8\] or one that fits input \(2, 3, 8\), got \(2, 3, 1\)",
        ),
        (lambda: llmk.nn.AttentionResidual(8)(torch.ones(0, 8)), r"blocks: expected shape \[N, \.\.\., 8\]"),
        (lambda: llmk.nn.HyperConnection(8)(torch.ones(3, 8), layer), r"input: expected shape \[\.\.\., 4, 8\]"),
        (lambda: llmk.nn.HyperConnection(8)(torch.ones(2, 4, 8), lambda x: x[..., :4]), "layer: expected a result"),
        (lambda: llmk.nn.MultiTokenAttention(4, 6, 3, groups=4), "out_channels: expected a multiple of groups 4"),
        (lambda: llmk.nn.MultiTokenAttention(4, 4, (3, 0)), "kernel_size: expected at least 1"),
        (
            lambda: llmk.nn.MultiTokenAttention(4, 4, 3)(torch.ones(1, 4, 5, 6)),
            r"scores: expected shape \[B, 4, S, S\], got \(1, 4, 5, 6\)",
        ),
    ],
)
def test_what_they_refuse(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
