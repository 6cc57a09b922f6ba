"""Weights of a tensor subclass, which may be quantized: what computes with them is left, and the report says so."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402
from llmk import functional, losses  # noqa: E402
from llmk.transformers import patch  # noqa: E402


class Rounded(torch.Tensor):
    """A weight as torchao's: whole numbers and a scale, which the products that it takes over multiply."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def of(cls, weight: Tensor) -> "Rounded":
        scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def full(self) -> Tensor:
        return self.whole * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].full(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(f"Rounded: {func}")


class Watched(torch.Tensor):
    """A weight as torchao's for training in 8 bits: plain numbers, and grouped products that it takes over."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watched.calls += "grouped_mm" in getattr(func, "__name__", "")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture(autouse=True)
def _on_device(device: torch.device):
    transformers.logging.set_verbosity_error()
    with device:
        yield


def quantize(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(Rounded.of(model.lm_head.weight), requires_grad=False)


def loss_and_gradient(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    return loss, torch.autograd.grad(loss, model.model.norm.weight)[0]


@pytest.mark.parametrize("first", ["patch", "quantize"])
@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
def test_a_quantized_projection(first: str) -> None:
    model = small_model("Llama", tie_word_embeddings=False).requires_grad_(False)
    model.model.norm.weight.requires_grad_()
    original = copy.deepcopy(model)
    report = patch(model) if first == "patch" else None
    quantize(model), quantize(original)
    report = report or patch(model)
    ids = tokens(2, 7)
    torch.testing.assert_close(loss_and_gradient(model, ids), loss_and_gradient(original, ids), rtol=1e-5, atol=1e-7)
    said = report.fell_back if first == "patch" else report.left
    assert f"a weight is a {__name__}.Rounded" in said[""]


@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_experts_that_take_products_over(first: str) -> None:
    model = small_model("Qwen3Moe", num_hidden_layers=1)
    model.set_experts_implementation("grouped_mm")
    original, ids = copy.deepcopy(model), tokens(2, 7)
    report = patch(model) if first == "patch" else None
    calls = []
    for m in (model, original):
        experts = m.model.layers[0].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, nn.Parameter(getattr(experts, name).data.as_subclass(Watched)))
    report = report or patch(model)
    for m in (original, model):
        Watched.calls = 0
        m(input_ids=ids, labels=ids).loss.backward()
        calls.append(Watched.calls)
    assert calls[0] == calls[1] > 0
    said = report.fell_back if first == "patch" else report.left
    assert "Watched" in said["model.layers.0.mlp.experts"]


@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_norms(first: str) -> None:
    model, original = small_model("Llama"), None
    original = copy.deepcopy(model)
    report = patch(model) if first == "patch" else None
    for m in (model, original):
        m.model.norm.weight = nn.Parameter(m.model.norm.weight.data.as_subclass(Watched))
    report = report or patch(model)
    assert_same_training(model, original, input_ids=tokens(2, 7))
    said = report.fell_back if first == "patch" else report.left
    assert "Watched" in said["model.norm"]


def test_plain_tensors_are_fused() -> None:
    """Parameters are plain tensors after functional_call and pruning."""
    model, original = pair(tie_word_embeddings=False)
    ids = tokens(2, 7)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, parameters, kwargs={"input_ids": ids, "labels": ids})
    assert output.logits is None
    torch.testing.assert_close(output.loss, original(input_ids=ids, labels=ids).loss)


x, weight, target = torch.randn(2, 4, 8), torch.randn(11, 8), torch.randint(0, 11, (2, 4))
CALLS: dict[str, Any] = {
    "fused_linear_ce": lambda w: functional.fused_linear_ce(x, w, target),
    "linear_logprobs": lambda w: functional.linear_logprobs(x, w, target),
    "fused_linear_jsd": lambda w: functional.fused_linear_jsd(x, weight, x, w),
    "linear_topk": lambda w: functional.linear_topk(x, w, 2),
    "sft": lambda w: losses.sft(x, w, target),
    "dpo": lambda w: losses.dpo(x, w, target, ref_logps=torch.zeros(2)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [Rounded.of, lambda w: w.as_subclass(Watched)], ids=["quantized", "watched"])
def test_a_loss_that_is_called_with_one_names_its_class(name: str, kind: Any) -> None:
    with (
        torch.device("cpu"),
        pytest.raises(TypeError, match=r"linear_weight: expected a plain .*, got a .*\.(Rounded|Watched)"),
    ):
        CALLS[name](kind(weight))
