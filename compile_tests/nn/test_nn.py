"""Modules take the state dict of the torch or Hugging Face module they stand for, and give its outputs."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llmk
from compile_tests.helpers.recurrence_functions import DeltaRule
from compile_tests.helpers.wrong_arguments import complete, not_named
from llmk.opcheck import accuracy_violation

HIDDEN, INTERMEDIATE = 24, 40


def modeling(family: str) -> Any:
    """The module of transformers that has a family's layers."""
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}", exc_type=ImportError)


def mlp(family: str) -> nn.Module:
    found, name = modeling(family), family.capitalize()
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 2}
    config = getattr(found, f"{name}Config")(**sizes)
    return getattr(found, f"{name}MLP")(config)


class DynamicTanh(nn.Module):
    """The activation of its paper."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class PlainPolyNorm(nn.Module):
    """PolyNorm as the authors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        cube, square, value = (u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6) for u in (x**3, x**2, x))
        return self.weight[0] * cube + self.weight[1] * square + self.weight[2] * value + self.bias


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "torch RMSNorm": (lambda: nn.RMSNorm(HIDDEN), lambda: llmk.nn.RMSNorm(HIDDEN), (5, HIDDEN)),
    "torch RMSNorm, two axes": (
        lambda: nn.RMSNorm((3, 8), eps=1e-5),
        lambda: llmk.nn.RMSNorm((3, 8), eps=1e-5),
        (5, 3, 8),
    ),
    "torch LayerNorm": (lambda: nn.LayerNorm(HIDDEN), lambda: llmk.nn.LayerNorm(HIDDEN), (2, 3, HIDDEN)),
    "torch LayerNorm without bias": (
        lambda: nn.LayerNorm([3, 8], 1e-3, bias=False),
        lambda: llmk.nn.LayerNorm([3, 8], 1e-3, bias=False),
        (2, 3, 8),
    ),
    "torch LayerNorm without parameters": (
        lambda: nn.LayerNorm(HIDDEN, elementwise_affine=False),
        lambda: llmk.nn.LayerNorm(HIDDEN, elementwise_affine=False),
        (4, HIDDEN),
    ),
    "torch GroupNorm": (lambda: nn.GroupNorm(4, 12), lambda: llmk.nn.GroupNorm(4, 12), (2, 12, 5, 3)),
    "torch GroupNorm without parameters": (
        lambda: nn.GroupNorm(4, 12, affine=False),
        lambda: llmk.nn.GroupNorm(4, 12, affine=False),
        (2, 12, 5),
    ),
    "DynamicTanh": (lambda: DynamicTanh(HIDDEN), lambda: llmk.nn.DyT(HIDDEN), (2, 5, HIDDEN)),
    "PolyNorm": (PlainPolyNorm, llmk.nn.PolyNorm, (2, 5, HIDDEN)),
    "LlamaRMSNorm": (
        lambda: modeling("llama").LlamaRMSNorm(HIDDEN, 1e-5),
        lambda: llmk.nn.RMSNorm(HIDDEN, 1e-5),
        (2, 5, HIDDEN),
    ),
    "LlamaMLP": (lambda: mlp("llama"), lambda: llmk.nn.SwiGLUMLP(HIDDEN, INTERMEDIATE), (2, 5, HIDDEN)),
    "GemmaRMSNorm": (
        lambda: modeling("gemma").GemmaRMSNorm(HIDDEN, 1e-5),
        lambda: llmk.nn.RMSNorm(HIDDEN, 1e-5, offset=1.0),
        (2, 5, HIDDEN),
    ),
    "GemmaMLP": (lambda: mlp("gemma"), lambda: llmk.nn.GeGLUMLP(HIDDEN, INTERMEDIATE), (2, 5, HIDDEN)),
}


def require_accurate(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    violation = accuracy_violation(ours, theirs, exact)
    assert violation is None, str(violation)


@pytest.mark.parametrize("name", MODULES)
def test_a_state_dict_loads_and_gives_the_same(name: str, device: torch.device) -> None:
    make_theirs, make_ours, shape = MODULES[name]
    theirs, ours = make_theirs().to(device), make_ours().to(device)
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms start at ones and zeros, which would hide a mix-up
            parameter.normal_()
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, device=device)
    # Hugging Face's norms compute in float32 whatever they are given: the rule's two units for few elements cover that.
    require_accurate(ours(x), theirs(x), copy.deepcopy(theirs).double()(x.double()))


@pytest.mark.parametrize(
    ("family", "name", "hybrid", "options"),
    [
        ("qwen3_next", "Qwen3NextRMSNormGated", lambda cls: cls(HIDDEN, 1e-5), {}),
        (
            "falcon_h1",
            "FalconH1RMSNormGated",
            lambda cls: cls(HIDDEN, 1e-5, n_groups=3, norm_before_gate=False),
            {"norm_before_gate": False, "group_size": HIDDEN // 3},
        ),
    ],
)
def test_gated_norms_of_hybrids(
    family: str, name: str, hybrid: Callable[[Any], nn.Module], options: dict[str, Any], device: torch.device
) -> None:
    theirs = hybrid(getattr(modeling(family), name)).to(device)
    ours = llmk.nn.RMSNormGated(HIDDEN, 1e-5, device=device, **options)
    with torch.no_grad():
        theirs.weight.normal_()
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(2, 2, 5, HIDDEN, device=device).unbind(0)
    exact = llmk.registry.OPS["rms_norm_gated"].reference(
        x.double(), gate.double(), theirs.weight.double(), 1e-5, **options
    )
    require_accurate(ours(x, gate), theirs(x, gate), exact)


@pytest.mark.parametrize("channels_last", [True, False])
def test_short_convolution_of_hybrids(channels_last: bool, device: torch.device) -> None:
    """The results are those of transformers' layers, whole and in two chunks."""
    theirs = nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN, padding=3, device=device)
    ours = llmk.nn.CausalConv1d(HIDDEN, 4, device=device, activation="silu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, HIDDEN, device=device).transpose(1, 2)
    x = x if channels_last else x.contiguous()

    def hybrid(conv: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.silu(conv(x)[..., :9])

    plain, exact = hybrid(theirs, x), hybrid(copy.deepcopy(theirs).double(), x.double())
    y, state = ours(x)
    require_accurate(y, plain, exact)
    assert torch.equal(state, x[..., -3:])
    first, state = ours(x[..., :5])
    second, _ = ours(x[..., 5:], initial_state=state)
    assert torch.equal(torch.cat([first, second], -1), y)


def delta_nets(device: torch.device) -> tuple[Any, llmk.nn.GatedDeltaNet]:
    """transformers' layer, two value heads for each of two key heads, and ours with its parameters."""
    sizes = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 6,
        "linear_key_head_dim": 8,
    }
    qwen = modeling("qwen3_5")
    theirs = qwen.Qwen3_5GatedDeltaNet(qwen.Qwen3_5TextConfig(hidden_size=HIDDEN, num_hidden_layers=4, **sizes), 0)
    ours = llmk.nn.GatedDeltaNet(HIDDEN, 4, 2, 6, 8, device=device)
    ours.load_state_dict(theirs.to(device).state_dict())
    return theirs, ours


def test_gated_delta_net_is_hugging_faces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, against the rule token by token in float64; compiled too."""
    theirs, ours = delta_nets(device)
    exact = copy.deepcopy(theirs).double()
    x, grad = torch.randn(2, 2, 70, HIDDEN, device=device).unbind(0)

    def results(module: Any, run: Callable[..., Any]) -> list[Tensor]:
        given = x.to(module.out_proj.weight.dtype, copy=True).requires_grad_()
        found = run(given)
        y = found[0] if isinstance(found, tuple) else found
        parameters = [parameter for _, parameter in sorted(module.named_parameters())]
        return [y, *torch.autograd.grad(y, [given, *parameters], grad.to(y.dtype))]

    def error(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm())

    plain = results(theirs, theirs)
    with monkeypatch.context() as replaced:
        replaced.setattr(modeling("qwen3_5"), "torch_chunk_gated_delta_rule", DeltaRule())
        want = results(exact, exact)
    for run in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        for got, other, right in zip(results(ours, run), plain, want, strict=True):
            assert error(got, right) <= 1.5 * error(other, right) + torch.finfo(torch.float32).eps * float(right.norm())


def test_gated_delta_net_in_chunks_and_packed(device: torch.device) -> None:
    _, net = delta_nets(device)
    x = torch.randn(2, 70, HIDDEN, device=device)
    whole, last = net(x)
    first, state = net(x[:, :33])
    second, state = net(x[:, 33:], initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(state, last)
    ids = (torch.arange(70, device=device) >= 33).long().expand(2, 70).contiguous()
    packed, state = net(x, ids)
    alone, last = net(x[:, 33:])
    torch.testing.assert_close(packed, torch.cat([first, alone], 1))
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_norms_default_eps_is_torchs(dtype: torch.dtype, device: torch.device) -> None:
    """The eps of rows so small that it decides them is that of float32, whatever the dtype."""
    theirs, ours = (cls(HIDDEN, device=device, dtype=dtype) for cls in (nn.RMSNorm, llmk.nn.RMSNorm))
    ours.load_state_dict(theirs.state_dict())
    x = 1e-3 * torch.randn(5, HIDDEN, device=device).to(dtype)
    exact = nn.functional.rms_norm(x.double(), (HIDDEN,), eps=torch.finfo(torch.float32).eps)
    require_accurate(ours(x), theirs(x), exact)


@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_rotary_embedding_knows_its_angles_after_to_empty(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = llmk.nn.RotaryEmbedding(8, 16, interleaved=True)
    rotary = llmk.nn.RotaryEmbedding(8, 16, interleaved=True, device=start)
    holder = nn.Sequential(rotary)
    monkeypatch.setattr(torch, "empty_like", lambda t, device: torch.full(t.shape, float("nan"), device=device))
    holder.to_empty(device="cpu")
    assert torch.equal(rotary.cos, built.cos)
    assert torch.equal(rotary.sin, built.sin)
    rotary.cos.fill_(float("nan"))
    rotary.reset_parameters()
    assert torch.equal(rotary.cos, built.cos)


def test_rotary_embedding_is_hugging_faces(device: torch.device) -> None:
    llama = modeling("llama")
    config = llama.LlamaConfig(hidden_size=HIDDEN, num_attention_heads=2)
    theirs = llama.LlamaRotaryEmbedding(config).to(device)
    ours = llmk.nn.RotaryEmbedding(HIDDEN // 2, 64).to(device)
    assert not ours.state_dict()
    q, k = torch.randn(2, 4, 7, HIDDEN // 2, device=device), torch.randn(2, 2, 7, HIDDEN // 2, device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 10, 11, 0, 1, 2, 3]], device=device)
    cos, sin = theirs(q, positions)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    exact = llama.apply_rotary_pos_emb(
        q.double(), k.double(), ours.cos[positions].double(), ours.sin[positions].double()
    )
    for triple in zip(ours(q, k, positions), expected, exact, strict=True):
        require_accurate(*triple)


def test_cross_entropy_tvd_loss_is_a_mean_of_both(device: torch.device) -> None:
    x, y = (2 * torch.randn(5, 33, device=device) for _ in range(2))
    target = torch.tensor([3, 7, -100, 0, 32], device=device)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        distance = 0.5 * (x.softmax(-1) - y.softmax(-1)).abs().sum(-1)
        return 0.3 * nn.functional.cross_entropy(x, target) + 2.0 * distance[target != -100].mean()

    require_accurate(llmk.nn.CrossEntropyTVDLoss(0.3, 2.0)(x, y, target), plain(x, y), plain(x.double(), y.double()))


def test_giou_loss(device: torch.device) -> None:
    corners = torch.rand(6, 2, 2, device=device)
    boxes = torch.cat((corners[:, 0], corners[:, 0] + corners[:, 1]), dim=-1)
    targets = boxes.clone()
    targets[3:, 3] = 0
    assert torch.equal(llmk.nn.GIoULoss("none")(boxes, targets)[3:], torch.zeros(3, device=device))
    assert llmk.nn.GIoULoss()(boxes, targets) < 1e-3


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (llmk.nn.RMSNorm(8), "RMSNorm((8,), eps=None, elementwise_affine=True, offset=0.0)"),
        (llmk.nn.LayerNorm((2, 4), bias=False), "LayerNorm((2, 4), eps=1e-05, elementwise_affine=True, bias=False)"),
        (
            llmk.nn.RMSNormGated(8, group_size=4),
            "RMSNormGated(8, eps=1e-06, activation='silu', norm_before_gate=True, group_size=4)",
        ),
        (
            llmk.nn.CausalConv1d(8, 4, bias=False),
            "CausalConv1d(8, kernel_size=4, bias=False, activation=None)",
        ),
        (llmk.nn.GroupNorm(2, 4), "GroupNorm(2, 4, eps=1e-05, affine=True)"),
        (llmk.nn.KLDivLoss("batchmean", True), "KLDivLoss(reduction='batchmean', log_target=True)"),
        (llmk.nn.CrossEntropyTVDLoss(), "CrossEntropyTVDLoss(ce_weight=1.0, tvd_weight=1.0, ignore_index=-100)"),
        (llmk.nn.GIoULoss(), "GIoULoss(reduction='mean', eps=1e-05)"),
    ],
)
def test_extra_repr(module: nn.Module, expected: str) -> None:
    assert repr(module) == expected


MADE: dict[str, tuple[Any, ...]] = {
    **{name: (8,) for name in ("RMSNorm", "LayerNorm", "RMSNormGated", "HyperConnection", "AttentionResidual", "DyT")},
    **{name: (8, 4) for name in ("CausalConv1d", "Embedding", "RotaryEmbedding", "SwiGLUMLP", "GeGLUMLP")},
    **{name: () for name in ("PolyNorm", "LinearLogProbs", *(n for n in llmk.nn.__all__ if n.endswith("Loss")))},
    **{"GroupNorm": (2, 4), "GatedDeltaNet": (8, 2, 1, 4, 4), "MultiTokenAttention": (4, 4, 3), "LinearTopK": (3,)},
    **{"ModulatedRMSNorm": (8,), "TiledMLP": (nn.Identity(), 4)},
}
"""Each module by its name, with what it is made of."""
ASKED_IN_A_CALL = {"ignore_index", "group_name", "context_group", "logits_dtype", "device", "dtype"}


def wrong_numbers(value: Any) -> Iterator[Any]:
    """Of a number or a word: what is none, and no size."""
    if isinstance(value, str):
        yield from ("nonsense", 3j, [1.0])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from ("x", 3j, [1.0], math.nan)
        yield from (-1,) if isinstance(value, int) else ()


def test_every_module_is_made() -> None:
    assert set(MADE) == {name for name in llmk.nn.__all__ if isinstance(getattr(llmk.nn, name), type)}


@pytest.mark.parametrize("name", MADE)
def test_a_module_refuses_its_options_when_it_is_made(name: str) -> None:
    module = getattr(llmk.nn, name)
    given = dict(zip(inspect.signature(module).parameters, MADE[name], strict=False))
    module(**given)
    assert not_named(module, complete(module, given), kinds=wrong_numbers, but=ASKED_IN_A_CALL) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llmk.nn.LayerNorm((3, 0)), r"normalized_shape: expected a positive integer or several, got \(3, 0\)"),
        (lambda: llmk.nn.LayerNorm("abc"), "normalized_shape: expected a positive integer or several, got 'abc'"),
        (lambda: llmk.nn.RMSNormGated(8, group_size=3), "hidden_size: expected a multiple of group_size 3"),
        (lambda: llmk.nn.CausalConv1d(8, 9), "kernel_size: expected 2 to 8, got 9"),
        (lambda: llmk.nn.CausalConv1d(8, 4, activation="gelu"), "activation: expected one of 'silu', 'swish'"),
        (lambda: llmk.nn.GatedDeltaNet(8, 3, 2, 4, 4), "num_v_heads: expected a multiple of 2 key heads, got 3"),
        (lambda: llmk.nn.GatedDeltaNet(8, 2, 1, 4, 257), "head_k_dim: expected 1 to 256, got 257"),
        (lambda: llmk.nn.GatedDeltaNet(8, 2, 1, 0, 4), "head_v_dim: expected 1 to 512, got 0"),
        (lambda: llmk.nn.GatedDeltaNet(8, 2, 1, 4, 4, 9), "conv_kernel_size: expected 2 to 8, got 9"),
        (lambda: llmk.nn.MultiTokenAttention(4, 4, (3,)), r"kernel_size: expected an int or two, got \(3,\)"),
    ],
)
def test_sizes_that_do_not_go_together(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input: expected shape \[\.\.\., 3, 8\], got \(2, 8, 3\)"):
        llmk.nn.LayerNorm((3, 8))(torch.randn(2, 8, 3))
    with pytest.raises(ValueError, match="num_channels: expected a multiple of num_groups 5, got 12"):
        llmk.nn.GroupNorm(5, 12)


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (
            TypeError,
            r"^weight: expected None or a tensor \[V\].*got int; .*loss\(hidden, lm_head\.weight, target\)",
            lambda: llmk.nn.LinearCrossEntropyLoss(16, 100),
        ),
        (
            TypeError,
            r"^SwiGLUMLP\.__init__\(\) missing 1 required .* 'intermediate_size'",
            lambda: llmk.nn.SwiGLUMLP(16),
        ),
        (
            ValueError,
            r"^input: expected shape \[\.\.\., 16\], got \(2, 15\)",
            lambda: llmk.nn.SwiGLUMLP(16, 32)(torch.randn(2, 15)),
        ),
        (
            ValueError,
            r"^input: expected shape \[\.\.\., 16\], got \(2, 15\)",
            lambda: llmk.nn.GeGLUMLP(16, 32)(torch.randn(2, 15)),
        ),
        (
            ValueError,
            r"^input: expected shape \[B, T, 16\] with T at least 1, got \(1, 2, 15\)",
            lambda: llmk.nn.GatedDeltaNet(16, 2, 1, 4, 4)(torch.randn(1, 2, 15)),
        ),
        (
            ValueError,
            "^q: expected at most 4 positions, got 5",
            lambda: llmk.nn.RotaryEmbedding(8, 4)(*torch.randn(2, 1, 2, 5, 8)),
        ),
        (
            ValueError,
            r"^position_ids: expected shape \[1 or 1, 5\], got \(5,\)",
            lambda: llmk.nn.RotaryEmbedding(8, 8)(*torch.randn(2, 1, 2, 5, 8), torch.arange(5)),
        ),
        (
            TypeError,
            "^position_ids: expected .* int64, int32, got float32",
            lambda: llmk.nn.RotaryEmbedding(8, 8)(*torch.randn(2, 1, 2, 5, 8), torch.zeros(1, 5)),
        ),
        (
            ValueError,
            r"^blocks: expected at least one tensor, and all of one shape, got \[\(2, 8\), \(3, 8\)\]",
            lambda: llmk.nn.AttentionResidual(8)([torch.randn(2, 8), torch.randn(3, 8)]),
        ),
        (
            TypeError,
            "^input: expected .* float32, float16, bfloat16, got int64",
            lambda: llmk.nn.HyperConnection(8, 2)(torch.zeros(3, 2, 8, dtype=torch.int64), lambda x: x),
        ),
        (
            TypeError,
            "^scores: expected floating-point numbers, got int64",
            lambda: llmk.nn.MultiTokenAttention(4, 4, 3)(torch.zeros(1, 4, 5, 5, dtype=torch.int64)),
        ),
        (
            TypeError,
            "^indices: expected .* int64, int32, got float32",
            lambda: llmk.nn.load_balance_loss(torch.randn(3, 4), torch.zeros(3, 2)),
        ),
        (
            TypeError,
            "^logits: expected floating-point numbers, got int64",
            lambda: llmk.nn.router_z_loss(torch.zeros(3, 4, dtype=torch.int64)),
        ),
    ],
)
def test_what_a_newcomer_gets_wrong(error, message, make) -> None:
    with pytest.raises(error, match=message):
        make()
