"""Tests what replacements were derived from, and who looks at what they bypass; where it differs, the original runs."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, spectral_norm

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers.loss import loss_utils  # noqa: E402

from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402
from llmk.transformers import patch  # noqa: E402
from tools.families_sweep import built  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


def alike(model: nn.Module, x: Tensor, change: Callable[[Any], object]) -> Any:
    """The report of a patched copy that gives, after a change of both, what the model does: output and gradients."""
    original, x = copy.deepcopy(model), x.requires_grad_()
    report = patch(model)
    change(original), change(model)
    outcomes = []
    for m in (model, original):
        y = m(x)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *m.parameters()], allow_unused=True)])
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
    return report


# ---- hooks (85)


def halves(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 2


def pre(module: nn.Module, args: Any) -> Any:
    return (2 * args[0],)


def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (3 * grad_input[0],)


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


HOOKS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "an activation's input": ("Llama", lambda m: m.model.layers[1].mlp.act_fn.register_forward_pre_hook(pre)),
    "an activation's gradient": ("Llama", lambda m: m.model.layers[1].mlp.act_fn.register_full_backward_hook(backward)),
    "experts' activation": ("Qwen3Moe", lambda m: m.model.layers[0].mlp.experts.act_fn.register_forward_hook(halves)),
    "a parametrized projection": (
        "Llama",
        lambda m: (
            parametrize.register_parametrization(m.lm_head, "weight", Half()),
            m.lm_head.register_forward_hook(halves),
        ),
    ),
    "a normed projection": (
        "Llama",
        lambda m: (torch.manual_seed(0), spectral_norm(m.lm_head), m.lm_head.register_forward_pre_hook(pre)),
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_what_is_bypassed(name: str) -> None:
    family, hook = HOOKS[name]
    model, original = pair(family, tie_word_embeddings=False)
    hook(model), hook(original)
    with pytest.warns(UserWarning, match="hook"):
        assert_same_training(model, original, input_ids=tokens(2, 7))
    assert "hook" in " ".join(patch(model).fell_back.values())
    assert any("hook" in line for line in str(patch(model)).splitlines())


def test_hooks_that_bring_weights_are_for_the_loss_too() -> None:
    model, original = pair(tie_word_embeddings=False)
    for m in (model, original):
        torch.manual_seed(0)
        spectral_norm(m.lm_head)
    assert assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None


def test_a_hook_on_all_modules_sees_all_of_them() -> None:
    model, original = pair()
    ids, seen = tokens(2, 7), {}
    for m in (original, model):
        calls: list[str] = []
        handle = register_module_forward_hook(lambda module, args, output, to=calls: to.append(type(module).__name__))
        seen[m] = calls, m(input_ids=ids, labels=ids).logits
        handle.remove()
    (want, logits), (got, patched_logits) = seen.values()
    assert Counter(got) == Counter(want)
    torch.testing.assert_close(patched_logits, logits)
    assert model(input_ids=ids, labels=ids).logits is None


def test_a_hook_on_all_modules_while_patching() -> None:
    """A trial does not call it, so the scale of the logits is the model's own after the hook is gone."""
    model, original, ids = small_model("Llama"), small_model("Llama"), tokens(2, 9)
    original.load_state_dict(model.state_dict())
    called: list[nn.Module] = []

    def doubles(module: nn.Module, args: Any, output: Any) -> Any:
        called.append(module)
        return 2 * output if isinstance(output, Tensor) else None

    hook = register_module_forward_hook(doubles)
    try:
        patch(model)
    finally:
        hook.remove()
    assert not called
    assert_same_training(model, original, input_ids=ids, labels=ids)


def test_a_hook_on_a_criterion() -> None:
    model = built(transformers.DistilBertForMaskedLM)
    original, ids = copy.deepcopy(model), tokens(2, 9).clamp(max=98)
    patch(model)
    for m in (model, original):
        m.mlm_loss_fct.register_forward_hook(halves)
    assert_same_training(model, original, input_ids=ids, labels=ids)


# ---- late changes (86)


class Settings:
    eps = 1e-6


class Norm(nn.Module):
    times = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.settings, self._eps = nn.Parameter(torch.rand(16) + 0.5), Settings(), 1e-6

    @property
    def eps(self) -> float:
        return self._eps

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.eps) * self.weight * self.times


class OfSettings(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.settings.eps) * self.weight


class AtTimes(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x, 1e-6) * self.weight
        return y + x if getattr(self, "adds", False) else y


SCALE = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class ByFunction(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.norm(x, 1e-6) * self.weight)


def twice(self: Any, x: Tensor) -> Tensor:
    return 2 * x * self.weight


CHANGES: dict[str, tuple[type[Norm], Callable[[Any], object]]] = {
    "an attribute of the class's": (Norm, lambda m: setattr(m[0], "times", 3.0)),
    "a property": (Norm, lambda m: setattr(m[0], "_eps", 1.0)),
    "a method": (Norm, lambda m: setattr(m[0], "norm", lambda x, eps: 2 * x)),
    "of another object": (OfSettings, lambda m: setattr(m[0].settings, "eps", 1.0)),
    "another object": (OfSettings, lambda m: setattr(m[0], "settings", type("Other", (), {"eps": 1.0})())),
    "what was not there": (AtTimes, lambda m: setattr(m[0], "adds", True)),
    "a forward": (Norm, lambda m: setattr(m[0], "forward", lambda x: 2 * x)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
def test_a_norm_that_changed(name: str) -> None:
    norm, change = CHANGES[name]
    report = alike(nn.Sequential(norm()), torch.randn(3, 16), change)
    assert report.replaced == {"norm": 1}
    assert name == "a forward" or "0" in report.fell_back


@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
def test_globals_and_methods_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    alike(nn.Sequential(ByFunction()), torch.randn(3, 16), lambda m: monkeypatch.setitem(globals(), "SCALE", 2.0))
    alike(nn.Sequential(ByFunction()), torch.randn(3, 16), lambda m: monkeypatch.setitem(globals(), "scaled", F.silu))
    alike(nn.Sequential(Norm()), torch.randn(3, 16), lambda m: monkeypatch.setattr(Norm, "norm", lambda s, x, e: x))
    alike(nn.Sequential(Norm()), torch.randn(3, 16), lambda m: monkeypatch.setattr(Norm, "forward", twice))


class Counts(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Appends(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return Norm.forward(self, x)


class CountsInABuffer(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return Norm.forward(self, x)


TOTAL = 0


class CountsForAll(Counts):
    def forward(self, x: Tensor) -> Tensor:
        global TOTAL
        TOTAL += 1
        return Norm.forward(self, x)


@pytest.mark.parametrize("norm", [Counts, Appends, CountsInABuffer, CountsForAll])
def test_a_norm_that_keeps_something_is_left(norm: type[Norm]) -> None:
    report = patch(nn.Sequential(norm()))
    assert not report.replaced
    assert "keeps something" in report.left["0"]


@pytest.mark.parametrize("function", [lambda logits, labels, vocab_size, **_: logits.square().mean()])
def test_a_loss_mapping_that_changed(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, model.loss_type or "ForCausalLM", function)
    with pytest.warns(
        UserWarning, match="the loss comes from logits, .*: loss_function is .*, and was ForCausalLMLoss"
    ):
        output = assert_same_training(model, original, input_ids=tokens(2, 7))
    assert output.logits is not None


def test_what_a_loss_function_calls_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    monkeypatch.setattr(
        loss_utils, "fixed_cross_entropy", lambda source, target, *args, **kwargs: source.logsumexp(-1).mean()
    )
    with pytest.warns(UserWarning, match="fixed_cross_entropy"):
        assert_same_training(model, original, input_ids=tokens(2, 7))


def test_compiled_it_is_one_graph_and_another_after_a_change() -> None:
    """The model is one graph each time, without a recompilation where nothing changes."""
    model, original = pair(num_hidden_layers=1)
    counter, ids = CompileCounterWithBackend("eager"), tokens(2, 7)
    run = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same_training(model, original, run, input_ids=ids)
    assert counter.frame_count == 1
    for m in (model, original):
        m.model.norm.variance_epsilon = 1.0
        m.model.layers[0].mlp.act_fn = nn.ReLU()
    with pytest.warns(UserWarning, match="llmk: LlamaRMSNorm: .*: self.variance_epsilon is 1.0, and was 1e-06"):
        assert_same_training(model, original, run, input_ids=ids)
    assert set(patch(model).fell_back) == {"model.norm", "model.layers.0.mlp"}
    assert counter.frame_count == 2


def test_each_guard_warns_once_and_unpatch_forgets() -> None:
    model, _ = pair()
    ids = tokens(2, 7)
    model.model.norm.variance_epsilon = 1.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            model(input_ids=ids, labels=ids)
    assert len([w for w in warned if str(w.message).startswith("llmk")]) == 1
    report = patch(model)
    why = "self.variance_epsilon is 1.0, and was 1e-06: the model's own code runs"
    assert report.fell_back == {"model.norm": why}
    report.unpatch()
    assert patch(model).fell_back == {}


# ---- the call protocol (87)


class Positional(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, items=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, items, 5)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_arguments_of_the_loss_by_position() -> None:
    model = Positional(small_model("Llama").config).train()
    original, ids = copy.deepcopy(model), tokens(2, 9).masked_fill(tokens(2, 9) % 4 == 0, 5)
    assert patch(model).replaced["loss"] == 1
    for items in (None, torch.tensor(40)):
        assert assert_same_training(model, original, input_ids=ids, items=items).logits is None


def test_a_projection_whose_hooks_know_one_argument(device: torch.device) -> None:
    model, original = pair(tie_word_embeddings=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for m in (model, original):
            plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(m, init_device_mesh(device.type, (1,)), plan)
        ids = tokens(2, 7)
        losses = [m(input_ids=ids, labels=ids).loss for m in (model, original)]
        torch.testing.assert_close(*losses)
        losses[0].backward()
    finally:
        dist.destroy_process_group()


# ---- transforms, which the operators refuse


Values = dict[str, Tensor]


def loss_of(model: nn.Module, values: Values, ids: Tensor) -> Tensor:
    return functional_call(model, values, kwargs={"input_ids": ids, "labels": ids}).loss


def per_sample(loss: Callable[..., Tensor], values: Values, ids: Tensor) -> Values:
    return vmap(lambda row: grad(loss)(values, row[None]))(ids)


def tangent(loss: Callable[..., Tensor], values: Values, ids: Tensor) -> Values:
    ones = {name: torch.ones_like(value) for name, value in values.items()}
    return {"loss": jvp(lambda values: loss(values, ids), (values,), (ones,))[1]}


def dual(loss: Callable[..., Tensor], values: Values, ids: Tensor) -> Values:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, torch.ones_like(value)) for name, value in values.items()}
        found = forward_ad.unpack_dual(loss(duals, ids)).tangent
    assert found is not None
    return {"loss": found}


TRANSFORMS: dict[str, Callable[..., Values]] = {
    "grad": lambda loss, values, ids: grad(loss)(values, ids),
    "grad, compiled": torch.compile(lambda loss, values, ids: grad(loss)(values, ids), backend="aot_eager"),
    "a gradient of each row": per_sample,
    "jvp": tangent,
    "forward-mode AD": dual,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_runs_the_model_itself(name: str) -> None:
    model, original = pair(num_hidden_layers=1, attn_implementation="eager")
    ids, transform = tokens(2, 7), TRANSFORMS[name]
    values = {key: value.detach() for key, value in original.named_parameters()}
    with pytest.warns(UserWarning, match="a transform of torch.func, or forward-mode AD, is active"):
        got = transform(partial(loss_of, model), values, ids)
    want = transform(partial(loss_of, original), values, ids)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert assert_same_training(model, original, input_ids=ids).logits is None  # and afterwards operators again


# ---- flags (91)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_flags_of_a_configuration_do_not_matter(family: str) -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "output_hidden_states": True}
    model = small_model(family, **options)
    original = copy.deepcopy(model)
    assert patch(model).replaced["loss"] == 1
    assert assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None
