"""What a patched model keeps for the backward pass: neither a gated unit's product nor a norm's output."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402
from llmk.registry import set_short_path_enabled  # noqa: E402
from llmk.transformers import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


def kept(model: nn.Module, call: Callable[[], Any]) -> int:
    """The numbers that a call keeps beside the weights, each part of memory once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values()) // 4


B, S, H, KV, F, HEADS = 2, 16, 64, 32, 256, 4
SIZES = {
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS * KV // H,
    "head_dim": H // HEADS,
    "attn_implementation": "sdpa",
}


def kept_by_a_layer(prepare: Callable[[Any], Any], **more: Any) -> float:
    """The numbers that one more layer keeps of each token."""
    counts = []
    for layers in (1, 2):
        model = small_model("Llama", **SIZES, num_hidden_layers=layers, use_cache=False, **more)
        prepare(model)
        ids = tokens(B, S)
        counts.append(kept(model, lambda model=model, ids=ids: model(input_ids=ids, labels=ids)))
    return (counts[1] - counts[0]) / (B * S)


NEEDED = 2 * H + 2 + H + 2 * KV + H + HEADS + 2 * F
"""Two sums, and a number of each for its norm; queries, keys, values and what attention makes of them; gate and up."""
LIGER = NEEDED + 2 * H + F
"""Liger 0.8.5 saves as much of each: its `LigerRMSNormFunction` input and rstd, `LigerSiLUMulFunction` gate and up, and
PyTorch's linear layers the outputs of both."""


def test_what_a_llama_layer_keeps(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("counts what the CPU's attention keeps")
    assert kept_by_a_layer(patch) == NEEDED
    assert kept_by_a_layer(lambda model: patch(model, projections=False)) == NEEDED + 2 * H
    assert kept_by_a_layer(lambda model: patch(model, projections=False, mlps=False)) > LIGER
    assert NEEDED < 0.7 * LIGER


def test_layers_that_are_not_plain_keep_what_they_did(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("counts what the CPU's attention keeps")

    def hooked(model: Any) -> None:
        patch(model)
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda *_: None)
            layer.self_attn.k_proj.register_forward_hook(lambda *_: None)

    def without_short_cuts(model: Any) -> None:
        patch(model)
        for layer in model.model.layers:
            layer.mlp.up_proj = torch.nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)

    assert kept_by_a_layer(hooked) == NEEDED + H + F
    assert kept_by_a_layer(without_short_cuts) >= NEEDED + H


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen2", "Qwen3", "Phi3", "Glm", "Mixtral"])
def test_training(family: str) -> None:
    model, original = pair(family)
    ids = tokens(2, 9)
    assert_same_training(model, original, input_ids=ids)


def frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" in name or "o_proj" in name)


def no_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "embed" not in name)


@pytest.mark.parametrize("prepare", [frozen, no_norms])
def test_some_weights_are_frozen(prepare: Callable[[nn.Module], None]) -> None:
    model, original = pair()
    prepare(model), prepare(original)
    ids = tokens(2, 9)
    original(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model, original = pair()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ran: list[bool] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *args: ran.append(torch.is_grad_enabled()))
    assert_same_training(model, original, input_ids=tokens(2, 9))
    assert ran == [not reentrant, True]  # in the forward pass, and again for the backward pass


class Changed(nn.Module):
    """Writes into its norm's output, before others read it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(16), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        with torch.no_grad():
            y.mul_(2.0)
        return self.inner(y)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def test_an_output_that_changed_is_not_made_again() -> None:
    torch.manual_seed(0)
    model = Changed(Layers())
    x = torch.randn(3, 16)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.inner.parameters()]
    model.zero_grad()
    assert patch(model).replaced == {"norm": 1, "projection": 1}
    model(x).sum().backward()
    for p, grad in zip(model.inner.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


def gathered_for_a_call(norm: Any, take: Callable[[Tensor], None]) -> None:
    """A norm whose weight is there while it is called, and from the gradient of its output on, as in ZeRO-3."""
    weight, data = norm.weight, norm.weight.detach().clone()
    take(weight)

    def bring(*_: Any) -> None:
        weight.untyped_storage().resize_(data.untyped_storage().nbytes())
        weight.data = data.clone()

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        take(weight)
        output.register_hook(bring)

    norm.register_forward_pre_hook(bring)
    norm.register_forward_hook(look)


def without_data(weight: Tensor) -> None:
    weight.data = weight.new_empty(0)


def without_memory(weight: Tensor) -> None:
    weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("take", [without_data, without_memory])
def test_a_weight_that_goes_after_the_call_is_not_read(take: Callable[[Tensor], None], device: torch.device) -> None:
    """FSDP2 with a norm as a unit of its own frees its memory, and ZeRO-3 puts nothing in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(16), Layers())
    nn.init.uniform_(model[0].weight, 0.5, 1.5)
    x = torch.randn(3, 16)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert patch(model).replaced == {"norm": 1, "projection": 1}
    gathered_for_a_call(model[0], take)
    model(x).sum().backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


class Branches(nn.Module):
    """Gives an argument to linear layers under conditions, changed, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        y = self.a(x) if twice else self.b(x)
        x = self.c(x) + x
        x = self.d(x)
        return x + y


def test_only_calls_that_are_always_made_and_of_the_same_value_are_moved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(16), Branches())
    x = torch.randn(3, 16)
    model(x).sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    report = patch(model)
    source = report.source("1")
    assert "llmk_c, = llmk_projections(x, self.c)" in source.replace("(llmk_c,)", "llmk_c,")
    assert "self.a(x) if twice else self.b(x)" in source
    assert "llmk_d, = llmk_projections(x, self.d)" in source.replace("(llmk_d,)", "llmk_d,")
    model(x).sum().backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        assert (p.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(p.grad, grad)


@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: set_short_path_enabled(False)])
def test_autocast(context: Callable[[], Any], device: torch.device) -> None:
    """The layers run in autocast's dtype, as PyTorch's do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(16), Layers())
    patch(model)
    x = torch.randn(3, 16)
    with context(), torch.autocast(device.type, dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
