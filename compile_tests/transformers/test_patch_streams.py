"""Hyper-connections that `llmk.transformers.patch` finds: values and gradients, eager and as one graph."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.families import COMMON, LATENT, MOE  # noqa: E402
from llmk.opcheck import accuracy_violation  # noqa: E402
from llmk.transformers import patch, streams  # noqa: E402

H, N = 24, 4
FAMILIES = {
    "deepseek_v4": "DeepseekV4HyperConnection",
    "glm5_next": "Glm5NextTextHyperConnection",
}


class Around(nn.Module):
    """A hyper-connection around a layer, as the families' decoder layers have it."""

    attn_hc: Any

    def __init__(self, connection: nn.Module) -> None:
        super().__init__()
        self.attn_hc = connection

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        post, comb, collapsed = self.attn_hc(hidden_states)
        output = collapsed * torch.sigmoid(collapsed)
        return post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), hidden_states
        )


class Exact(Around):
    """The same in float64, where the families' own code would compute in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        own, x = self.attn_hc, hidden_states.double()
        row = x.flatten(2)
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + own.input_norm.eps)
        parts = (row @ own.fn.T).split([N, N, N * N], -1)
        read, write, mix = (p * s + b for p, s, b in zip(parts, own.scale, own.base.split([N, N, N * N]), strict=True))
        matrix = mix.unflatten(-1, (N, N)).softmax(-1) + own.hc_eps
        for turn in range(2 * own.hc_sinkhorn_iters - 1):
            matrix = matrix / (matrix.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + own.hc_eps)
        collapsed = ((read.sigmoid() + own.hc_eps).unsqueeze(-1) * x).sum(2)
        output = collapsed * collapsed.sigmoid()
        return 2 * write.sigmoid().unsqueeze(-1) * output.unsqueeze(-2) + matrix.mT @ x


def around(family: str) -> Around:
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", exc_type=ImportError)
    config = transformers.AutoConfig.for_model(family)
    config = getattr(config, "text_config", config)
    config.hidden_size, config.hc_mult = H, N
    model = Around(getattr(modeling, FAMILIES[family])(config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def results(model: Any, parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, x.dtype)
    return [y, *torch.autograd.grad(y, [x, *parameters], grad.to(y.dtype))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family: str, dtype: torch.dtype, compiled: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    own = around(family).to(device, dtype)
    patched = copy.deepcopy(own)
    report = patch(patched)
    found = {(entry.name, entry.text) for entry in report.entries if entry.kind == "streams"}
    assert found == {("", "write_streams"), ("attn_hc", "read_streams, rms_linear, sinkhorn")}
    exact = Exact(copy.deepcopy(own.attn_hc)).double()
    function = torch.compile(patched, backend="aot_eager", fullgraph=True) if compiled else patched
    x = torch.randn(2, 5, N, H, device=device).to(dtype)
    got, composition = (results(f, list(m.parameters()), x) for f, m in ((function, patched), (own, own)))
    right = results(exact, list(exact.parameters()), x.double())
    for actual, baseline, expected in zip(got, composition, right, strict=True):
        assert actual.dtype == baseline.dtype
        assert (violation := accuracy_violation(actual, baseline, expected)) is None, str(violation)


class Independent(nn.Module):
    """HY-V4's hyper-connection in float64: what a layer reads, without a mixture of the streams."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        own, row = self.own, x.flatten(2)
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + own.input_norm.eps)
        head = hasattr(own, "hc_fn")
        fn, scale, base = (own.hc_fn, own.hc_scale, own.hc_base) if head else (own.fn, own.scale, own.base)
        eps = own.eps if head else own.hc_eps
        return (((row @ fn[:N].T * scale[0] + base[:N]).sigmoid() + eps).unsqueeze(-1) * x).sum(2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["HYV4HyperConnection", "HYV4HyperHead"])
def test_a_sum_that_is_cast_later(name: str, dtype: torch.dtype, compiled: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    modeling = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4", exc_type=ImportError)
    config = transformers.AutoConfig.for_model("hy_v4")
    config.hidden_size, config.hc_mult = H, N
    own = getattr(modeling, name)(config).to(device, dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.5)
    patched, exact = copy.deepcopy(own), Independent(copy.deepcopy(own)).double()
    assert [entry.text for entry in patch(patched).entries if entry.kind == "streams"] == ["read_streams"]
    function = torch.compile(patched, backend="aot_eager", fullgraph=True) if compiled else patched

    def read(function: Any, x: Tensor) -> Tensor:
        outputs = function(x)
        return outputs[-1] if isinstance(outputs, tuple) else outputs

    x = torch.randn(2, 5, N, H, device=device).to(dtype)
    got, composition, right = (
        results(functools.partial(read, f), list(m.parameters()), value)
        for f, m, value in ((function, patched, x), (own, own, x), (exact, exact, x.double()))
    )
    for actual, baseline, expected in zip(got, composition, right, strict=True):
        assert actual.dtype == baseline.dtype
        assert (violation := accuracy_violation(actual, baseline, expected)) is None, str(violation)


class Rebound(nn.Module):
    """Streams of another dtype by the time that the sum is cast."""

    def forward(self, weights: Tensor, x: Tensor) -> Tensor:
        y = torch.sum(weights.unsqueeze(-1) * x, dim=2)
        x = x.double()
        return y.to(x.dtype)


class Twice(nn.Module):
    """A sum that is used uncast too."""

    def forward(self, weights: Tensor, x: Tensor) -> Tensor:
        y = torch.sum(weights.unsqueeze(-1) * x, dim=2)
        return y + y.to(x.dtype)


@pytest.mark.parametrize("module", [Rebound, Twice])
def test_sums_that_are_not_only_cast(module: type[nn.Module]) -> None:
    assert "streams" not in patch(module()).replaced


def test_what_does_not_fit_runs_as_it_is_written(device: torch.device) -> None:
    own = around("deepseek_v4").to(device).double()
    patched = copy.deepcopy(own)
    patch(patched)
    x = torch.randn(2, 5, N, H, device=device, dtype=torch.float64)
    assert torch.equal(patched(x), own(x))


def test_a_model_has_them_in_every_layer(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    heads = {"num_key_value_heads": 4, "head_dim": 8}
    config = transformers.AutoConfig.for_model("deepseek_v4", **{**COMMON, **MOE, **LATENT, **heads})
    with device:
        model = transformers.AutoModel.from_config(config).eval()
        ids = torch.randint(3, 101, (2, 12))
    want = model(input_ids=ids, use_cache=False).last_hidden_state
    called = dict.fromkeys(streams.CALLED, 0)

    def counted(name: str, *args: Any) -> Any:
        called[name] += 1
        return getattr(torch.ops.llmk, name)(*args)

    assert patch(model).replaced["streams"] == 2 + 2 * 2 + 1
    for name in called:
        monkeypatch.setattr(streams.functional, name, functools.partial(counted, name))
    got = model(input_ids=ids, use_cache=False).last_hidden_state
    assert called == {"rms_linear": 4, "sinkhorn": 4, "read_streams": 5, "write_streams": 4}
    torch.testing.assert_close(got, want)
