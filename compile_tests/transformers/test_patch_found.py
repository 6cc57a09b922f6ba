"""Modules that `llmk.transformers.patch` finds or leaves: no replacement does something else."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import COMMON, LATENT, MOE, small_model  # noqa: E402
from compile_tests.helpers.gated_units import Unit  # noqa: E402
from llmk.transformers import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


def test_report_is_a_table():
    report = patch(small_model("GptOss"), experts=False)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("left: its gate is neither SwiGLU nor GeGLU" in " ".join(line.split()) for line in lines)
    assert set(report.left) == {f"model.layers.{i}.mlp.experts" for i in range(2)}


# ---- norms


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.at_most = nn.Parameter(torch.rand(16) + 0.5), 1e-6, 100.0
        self.p = {"dropout": 0.0}
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * self.weight

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Nearly(Norm):
    """Wrong in the third digit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * self.normed(x) * self.weight


class OtherEps(Norm):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 10 * self.eps)


class WrongGradient(Norm):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach()


class TwoInputs(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = self.normed(x) * self.weight
        return y if gate is None else y * gate


class Clamps(Norm):
    """Reaches its bound only where the input is huge."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x.clamp(-self.at_most, self.at_most))


class DropsInTraining(Norm):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().normed(x), 0.1, self.training)


class ReadsABuffer(Norm):
    """A norm that reads a buffer, whose values may change, and nothing tells."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x) * self.scale


class ReadsADict(Norm):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x) + self.p["dropout"]


class LooksAtValues(Norm):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x) if x.abs().max() < 1e6 else x


@pytest.mark.parametrize(
    "norm", [Nearly, WrongGradient, TwoInputs, Clamps, DropsInTraining, LooksAtValues, ReadsABuffer, ReadsADict]
)
def test_what_does_something_else_is_left(norm: type[Norm]):
    model = nn.Sequential(norm()).eval()
    report = patch(model)
    assert not report.replaced
    assert "0" in report.left
    assert type(model[0]) is norm


def test_eps_is_found_not_read():
    """Ten times the attribute is 1e-5, which is tried; what counts is what the module computes."""
    model = nn.Sequential(OtherEps())
    x = 1e-3 * torch.randn(3, 16)
    want = model(x)
    assert patch(model).replaced == {"norm": 1}
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_an_eps_it_is_that_of_float32(dtype: torch.dtype):
    """The dtype's own eps would give a hundredth where eps decides, of inputs of 1e-4."""
    model = nn.Sequential(nn.RMSNorm(16)).to(dtype)
    x = (1e-4 * torch.randn(3, 16)).to(dtype)
    want = model(x)
    assert patch(model).replaced == {"norm": 1}
    (norm,) = type(model[0])._llmk_changes
    assert (dtype, dtype) in norm.proven  # it is the operator that runs
    torch.testing.assert_close(model(x), want)


class Options:
    factor = 1.0


class ReadsAround(Norm):
    """Its result depends on a number, and on one of an object, which its type does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.options = 0.0, Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * self.weight * self.options.factor + self.plus


def test_modules_that_read_different_things_are_told_apart():
    model = nn.Sequential(*(ReadsAround() for _ in range(4)))
    model[1].plus = 0.5
    model[2].options.factor = 2.0
    x = torch.randn(3, 16)
    want = [norm(x) for norm in model]
    assert [entry.replaced for entry in patch(model).entries] == [True, False, False, True]
    for norm, y in zip(model, want, strict=True):
        torch.testing.assert_close(norm(x), y)


class RoundsToTheWeight(Norm):
    """A norm as T5's: the result has the weight's dtype where that is a short one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x.float())
        return self.weight * (y if self.weight.dtype == torch.float32 else y.to(self.weight.dtype))


class Promotes(Norm):
    """A norm as Llama's: a float32 weight makes the result float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normed(x.float()).to(x.dtype)


@pytest.mark.parametrize("norm", [RoundsToTheWeight, Promotes, nn.RMSNorm, nn.LayerNorm])
def test_results_keep_the_dtype_they_had(norm: Any):
    model = nn.Sequential(norm(16) if norm in (nn.RMSNorm, nn.LayerNorm) else norm())
    x = torch.randn(3, 16)
    original = copy.deepcopy(model)
    assert patch(model).replaced == {"norm": 1}
    for of_weight, of_input in itertools.product([torch.float32, torch.bfloat16, torch.float64], repeat=2):
        model.to(of_weight), original.to(of_weight)
        try:
            want = original(x.to(of_input))
        except RuntimeError:  # torch's layer_norm does not mix dtypes as it likes
            with pytest.raises(RuntimeError):
                model(x.to(of_input))
            continue
        got = model(x.to(of_input))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


class GatedNorm(Norm):
    """A gated norm as Mamba-2's, in two groups; without a gate it is a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 2

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        h = x if gate is None else self.gated(x, gate)
        return self.normed(h.unflatten(-1, (self.groups, -1))).flatten(-2) * self.weight

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.silu(gate)


class NormBeforeGate(GatedNorm):
    """A gated norm as Kimi's."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = self.normed(x) * self.weight
        return y if gate is None else y * gate.sigmoid()


class GateOfNearlyOne(GatedNorm):
    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.silu(1.001 * gate)


class GateOfItsOwn(GatedNorm):
    """The gate has no gradient."""

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().gated(x, gate.detach())


@pytest.mark.parametrize("norm", [GatedNorm, NormBeforeGate])
def test_a_norm_with_a_gate_is_found(norm: type[Norm]):
    model = norm()
    original = copy.deepcopy(model)
    assert patch(model).replaced == {"norm": 1}
    x, gate = torch.randn(2, 3, 5, 16).unbind(0)
    for others in ((gate,), (), (gate[:1],), (gate.double(),)):  # what is not as it was tried is the module's own
        torch.testing.assert_close(model(x, *others), original(x, *others))
    (change,) = type(model)._llmk_changes
    assert change.what.startswith("rms_norm_gated")
    assert (torch.float32, torch.float32) in change.proven


@pytest.mark.parametrize("norm", [GateOfNearlyOne, GateOfItsOwn])
def test_another_gate_is_left(norm: type[Norm]):
    report = patch(nn.Sequential(norm()))
    assert not report.replaced
    assert "computes no RMSNorm over the last axis with a gate" in str(report.entries)


# ---- convolutions


def causal(x, weight, bias=None, activation=None, **kwargs):
    y = nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=x.shape[1])
    y = y[..., : x.shape[-1]]
    return y if activation is None else nn.functional.silu(y)


def nearly_causal(x, weight, bias=None, activation=None):
    return 1.001 * causal(x, weight, bias, activation)


def looking_ahead(x, weight, bias=None, activation=None):
    return causal(x.flip(-1), weight, bias, activation).flip(-1)


def without_gradient(x, weight, bias=None, activation=None):
    return causal(x, weight, None if bias is None else bias.detach(), activation)


def softly(x, weight, bias=None, activation=None):
    y = causal(x, weight, bias)
    return y if activation is None else nn.functional.gelu(y)


class Short(nn.Module):
    """A convolution of its own, by the function that its source calls `convolve`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 4, groups=6)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return convolve(
            x.transpose(1, 2), self.conv.weight.squeeze(1), bias=self.conv.bias, activation="silu", **kwargs
        )


convolve: Any = causal


def by_operator(result: torch.Tensor) -> bool:
    assert result.grad_fn is not None
    return "causal_conv1d" in result.grad_fn.name()


def test_a_convolution_is_found():
    model = Short()
    original = copy.deepcopy(model)
    report = patch(model)
    assert report.replaced == {"convolution": 1}
    assert "llmk_causal_conv1d_0(self, convolve, x.transpose(1, 2)" in report.source()
    x = torch.randn(2, 9, 6)
    assert by_operator(model(x))
    torch.testing.assert_close(model(x), original(x))
    for module, given in ((model, x), (original, x)):
        module(given).square().sum().backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    got, want = (m.double()(x.double()) for m in (model, original))
    assert not by_operator(got)  # what is not as it was tried is the module's own
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("function", [nearly_causal, looking_ahead, without_gradient, softly])
def test_another_convolution_is_left(function: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "convolve", function)
    report = patch(Short())
    assert not report.replaced
    assert "convolve" in str(report.entries)


def update(x, conv_state, weight, bias=None, activation=None):
    both = torch.cat([conv_state, x], -1)
    conv_state.copy_(both[..., x.shape[-1] :])
    return causal(both, weight, bias, activation)[..., -x.shape[-1] :]


def forgetful(x, conv_state, weight, bias=None, activation=None):
    return causal(torch.cat([conv_state, x], -1), weight, bias, activation)[..., -x.shape[-1] :]


class Updated(Short):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return updating(x, state, self.conv.weight.squeeze(1), self.conv.bias, "silu")


updating: Any = update


@pytest.mark.parametrize("longer", [0, 2])
def test_an_update_by_one_token_is_found(longer: int):
    """Gradients are right too: autograd keeps the state that it was."""
    model = Updated()
    original = copy.deepcopy(model)
    report = patch(model)
    assert report.replaced == {"convolution": 1}
    assert [entry.text for entry in report.entries] == ["causal_conv1d_step"]
    state = torch.randn(2, 6, 3 + longer)
    for tokens in (1, 4):  # of several the function itself takes care
        x, results = torch.randn(2, 6, tokens), []
        for m in (model, original):
            now = state.clone()
            y = m(x, now)
            m.zero_grad()
            y.square().sum().backward()
            results.append((y, now, *(p.grad for p in m.parameters())))
            if m is model and tokens == 1:
                assert "causal_conv1d_step" in y.grad_fn.next_functions[0][0].name()
        torch.testing.assert_close(*results)


def test_an_update_that_leaves_another_state_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "updating", forgetful)
    report = patch(Updated())
    assert not report.replaced
    assert "updating leaves another state" in str(report.entries)


def continued(x, weight, bias=None, activation=None, initial_states=None, **kwargs):
    y = causal(x if initial_states is None else torch.cat([initial_states, x], -1), weight, bias, activation)
    return y[..., y.shape[-1] - x.shape[-1] :]


def test_what_a_function_has_a_name_for_is_given_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "convolve", continued)
    model = Short()
    original, x, state = copy.deepcopy(model), torch.randn(2, 9, 6), torch.randn(2, 6, 3)
    assert patch(model).replaced == {"convolution": 1}
    assert by_operator(model(x, initial_states=None, use_cache=True))
    torch.testing.assert_close(model(x, initial_states=state), original(x, initial_states=state))


def test_a_function_that_took_the_place_of_another_is_called(monkeypatch: pytest.MonkeyPatch):
    model, x = Short(), torch.randn(2, 9, 6)
    patch(model)
    want = model(x)
    monkeypatch.setitem(globals(), "convolve", nearly_causal)
    torch.testing.assert_close(model(x), 1.001 * want)


# ---- gated units


class OwnAct(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.act(self.gate(x)))


class InTwoSteps(Unit):
    """A gated unit as T5's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act(self.gate(x))
        up = self.up(x)
        y = gate * up
        return self.down(nn.functional.dropout(y, 0.5, self.training))


class Packed(Unit):
    """Halves of one tensor; the second product's are not, because one was changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([self.gate(x), self.up(x)], -1).chunk(2, dim=-1)
        y = self.act(gate) * up
        up = up.clamp(max=0.1)
        return self.down(y + self.act(gate) * up)


class Swish(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


def test_gated_units_are_told_by_what_they_compute():
    tanh = functools.partial(nn.functional.gelu, approximate="tanh")
    units = [Unit(), *(OwnAct(act) for act in (nn.functional.silu, nn.functional.gelu, tanh, nn.SiLU(), Swish(1.0)))]
    units += [OwnAct(nn.GELU()), OwnAct(nn.GELU("tanh")), InTwoSteps(nn.SiLU()), Packed(nn.GELU())]
    left = [OwnAct(torch.relu), OwnAct(Swish(1.1)), OwnAct(nn.Identity()), OwnAct(lambda x: x.clamp(max=50).sigmoid())]
    model = nn.ModuleList(units + left)
    x = 100 * torch.randn(3, 8)

    def outcomes() -> list[torch.Tensor]:
        torch.manual_seed(0)
        ys = [unit(x) for unit in model]
        return [*ys, *torch.autograd.grad(sum(y.sum() for y in ys), list(model.parameters()))]

    want = outcomes()
    report = patch(model)
    assert report.replaced == {"mlp": len(units)}
    assert list(report.left) == [str(i) for i in range(len(units), len(model))]
    assert report.left["10"] == "self.act, relu, uses relu"
    for got, y in zip(outcomes(), want, strict=True):
        torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-4)
    for unit in model:  # another one in its place
        unit.act = nn.ReLU()
    want = outcomes()
    report.unpatch()
    for got, y in zip(outcomes(), want, strict=True):
        torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v4", "hy_v4", "glm5_next_text", "seed_oss"])
def test_clamps_and_dropout_around_gated_units_stay(family: str):
    """Large weights reach the clamps; dropout is on only after patch() has seen the model."""
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    }
    odd = {"swiglu_limit": 4.0, "residual_dropout": 0.1, "use_cache": False}
    if family == "glm5_next_text":
        odd["qk_rope_head_dim"] = 0
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **MOE, **LATENT, **heads, **odd})
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    original, ids = copy.deepcopy(model), torch.randint(3, 101, (2, 12))
    assert patch(model).replaced["mlp"] >= 2
    results = []
    for m in (original.train(), model.train()):
        torch.manual_seed(0)
        y = m(input_ids=ids).last_hidden_state
        results.append([y, *torch.autograd.grad(y, list(m.parameters()), torch.ones_like(y), allow_unused=True)])
    largest = max(g.abs().max() for g in results[0] if g is not None)
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert want is None or float((got - want).abs().max()) <= 1e-5 * float(want.abs().max() + largest)


# ---- residual sums


class NormInPlaceOfTheCopy(nn.Module):
    """Between sum and norm stands a copy whose name the norm takes: only the norm may remain there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + 2 * x
        y = h
        y = self.norm(h)
        return y - h


def test_a_copy_that_the_norm_replaces_is_left():
    model, x = NormInPlaceOfTheCopy(), torch.randn(3, 16)
    want = model(x)
    assert patch(model).replaced == {"norm": 1}
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe", "Llama", "Cohere"])
def test_the_rotation_of_every_layout_is_found(family: str):
    """Pairs that are sorted, halves, some features, neighbours."""
    report = patch(small_model(family))
    assert report.replaced["rope"] == 2
    assert not [entry for entry in report.entries if entry.kind == "rope" and not entry.replaced]
