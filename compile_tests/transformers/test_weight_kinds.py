"""Weights of a tensor subclass, which may be quantized: what computes with them is left, and the report says so."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.masked import masked_tensor
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402
from llmk import functional, losses  # noqa: E402
from llmk.registry import foreign_kind  # noqa: E402
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


pytestmark = pytest.mark.usefixtures("on_device")


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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_loss_of_a_dtensor_names_the_class_of_what_it_holds(name: str, mesh: DeviceMesh) -> None:
    """A DTensor holds the weight, as FSDP2 holds those of torchao."""
    with torch.device("cpu"):
        held = DTensor.from_local(weight.as_subclass(Watched), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"linear_weight: expected a plain tensor or a DTensor, got a .*\.Watched"):
            CALLS[name](held)


def test_which_kinds_compute_in_their_own_way(mesh: DeviceMesh) -> None:
    plain = torch.randn(4, 8)
    sharded = DTensor.from_local(plain, mesh, [Shard(0)])
    fake = FakeTensorMode().from_tensor(plain)
    for own in (plain, nn.Parameter(plain), nn.Buffer(plain), sharded, nn.Parameter(sharded), fake):
        assert foreign_kind(own) is None
    watched = plain.as_subclass(Watched)
    for foreign in (watched, nn.Parameter(watched), DTensor.from_local(watched, mesh, [Shard(0)]), Rounded.of(plain)):
        assert "test_weight_kinds." in (foreign_kind(foreign) or "")
    with pytest.warns(UserWarning, match="prototype"):
        masked = masked_tensor(plain, plain > 0)
    assert foreign_kind(masked) == "torch.masked.maskedtensor.core.MaskedTensor"
    assert foreign_kind(TwoTensor(plain, plain)) == "torch.testing._internal.two_tensor.TwoTensor"


@pytest.mark.parametrize("name", ["lm_head", "model.norm"])
@pytest.mark.parametrize("first", ["patch", "parametrize"])
def test_parametrized_weights_are_fused(name: str, first: str) -> None:
    """Such a weight is computed whenever it is read, and is a plain tensor."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = small_model("Llama", tie_word_embeddings=False)
    original = copy.deepcopy(model)
    report = patch(model) if first == "patch" else None
    for m in (model, original):
        parametrize.register_parametrization(m.get_submodule(name), "weight", Doubled())
    report = report or patch(model)
    ids = tokens(2, 7)
    assert_same_training(model, original, input_ids=ids)
    assert model(input_ids=ids, labels=ids).logits is None
    assert name not in report.fell_back.keys() | report.left.keys()


@pytest.mark.parametrize("family", ["Llama", "Phi"])
@pytest.mark.parametrize("first", ["patch", "parametrize"])
def test_a_parametrized_projection_is_read_as_often(family: str, first: str) -> None:
    """In training each reading is a step of the power iteration, whose vectors are part of the state dict."""
    model = small_model(family, tie_word_embeddings=False)
    original = copy.deepcopy(model)
    if first == "patch":
        patch(model)
    for m in (model, original):
        torch.manual_seed(0)
        parametrizations.spectral_norm(m.lm_head)
    patch(model)
    for _ in range(2):
        assert assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None
    torch.testing.assert_close(*(dict(m.lm_head.named_buffers()) for m in (model, original)), rtol=0, atol=0)


@pytest.mark.parametrize("unpatched", [False, True])
@pytest.mark.parametrize("first", ["patch", "parametrize"])
def test_a_parametrization_can_be_taken_away(first: str, unpatched: bool) -> None:
    """PyTorch deletes its property from the module's very class, and gives it the base of that class."""
    model = small_model("Llama", tie_word_embeddings=False)
    original = copy.deepcopy(model)
    report = patch(model) if first == "patch" else None
    for m in (model, original):
        parametrizations.weight_norm(m.lm_head)
    report = report or patch(model)
    if unpatched:
        report.unpatch()
    assert (assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None) == (not unpatched)
    for m in (model, original):
        parametrize.remove_parametrizations(m.lm_head, "weight")
    assert (assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None) == (not unpatched)
    if not unpatched:
        report.unpatch()
    assert type(model.lm_head) is nn.Linear


@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
def test_a_projection_in_a_dtensor_of_another_kind(mesh: DeviceMesh) -> None:
    model = small_model("Llama", tie_word_embeddings=False)
    held = DTensor.from_local(model.lm_head.weight.detach().as_subclass(Watched), mesh, [Replicate()])
    del model.lm_head.weight  # a parameter would be a detached DTensor, whose part is no Watched any more
    model.lm_head.weight = held
    assert f"a weight is a {__name__}.Watched" in patch(model).left[""]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [Rounded.of, lambda w: w.as_subclass(Watched)], ids=["quantized", "watched"])
def test_a_loss_that_is_called_with_one_names_its_class(name: str, kind: Any) -> None:
    with (
        torch.device("cpu"),
        pytest.raises(TypeError, match=r"linear_weight: expected a plain .*, got a .*\.(Rounded|Watched)"),
    ):
        CALLS[name](kind(weight))
