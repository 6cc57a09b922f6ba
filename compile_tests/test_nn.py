"""Modules take the state dict of the torch or Hugging Face module they stand for, and give its outputs."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

import llmk
from llmk.opcheck import accuracy_violation

HIDDEN, INTERMEDIATE = 24, 40
llama = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=2, rms_norm_eps=1e-5)
gemma = GemmaConfig(
    hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=2, head_dim=16, rms_norm_eps=1e-5
)

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "torch RMSNorm": (lambda: nn.RMSNorm(HIDDEN), lambda: llmk.nn.RMSNorm(HIDDEN, None), (5, HIDDEN)),
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
    "LlamaRMSNorm": (lambda: LlamaRMSNorm(HIDDEN, 1e-5), lambda: llmk.nn.RMSNorm(HIDDEN, 1e-5), (2, 5, HIDDEN)),
    "LlamaMLP": (lambda: LlamaMLP(llama), lambda: llmk.nn.SwiGLUMLP(HIDDEN, INTERMEDIATE), (2, 5, HIDDEN)),
    "GemmaRMSNorm": (
        lambda: GemmaRMSNorm(HIDDEN, 1e-5),
        lambda: llmk.nn.RMSNorm(HIDDEN, 1e-5, offset=1.0),
        (2, 5, HIDDEN),
    ),
    "GemmaMLP": (lambda: GemmaMLP(gemma), lambda: llmk.nn.GeGLUMLP(HIDDEN, INTERMEDIATE), (2, 5, HIDDEN)),
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


def test_rotary_embedding_is_hugging_faces(device: torch.device) -> None:
    theirs = LlamaRotaryEmbedding(llama).to(device)
    ours = llmk.nn.RotaryEmbedding(HIDDEN // 2, 64).to(device)
    assert not ours.state_dict()
    q, k = torch.randn(2, 4, 7, HIDDEN // 2, device=device), torch.randn(2, 2, 7, HIDDEN // 2, device=device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 10, 11, 0, 1, 2, 3]], device=device)
    cos, sin = theirs(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    exact = apply_rotary_pos_emb(q.double(), k.double(), ours.cos[positions].double(), ours.sin[positions].double())
    for triple in zip(ours(q, k, positions), expected, exact, strict=True):
        require_accurate(*triple)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_kl_div_loss_is_torchs(reduction: str, log_target: bool, device: torch.device) -> None:
    input, target = (torch.randn(5, 33, device=device).log_softmax(-1) for _ in range(2))
    target = target if log_target else target.exp()
    theirs = nn.KLDivLoss(reduction=reduction, log_target=log_target)
    ours = llmk.nn.KLDivLoss(reduction, log_target)
    require_accurate(ours(input, target), theirs(input, target), theirs(input.double(), target.double()))


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
        (llmk.nn.RMSNorm(8), "RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=0.0)"),
        (llmk.nn.LayerNorm((2, 4), bias=False), "LayerNorm((2, 4), eps=1e-05, elementwise_affine=True, bias=False)"),
        (llmk.nn.GroupNorm(2, 4), "GroupNorm(2, 4, eps=1e-05, affine=True)"),
        (llmk.nn.KLDivLoss("batchmean", True), "KLDivLoss(reduction='batchmean', log_target=True)"),
        (llmk.nn.GIoULoss(), "GIoULoss(reduction='mean', eps=1e-05)"),
    ],
)
def test_extra_repr(module: nn.Module, expected: str) -> None:
    assert repr(module) == expected


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input: expected shape \[\.\.\., 3, 8\], got \(2, 8, 3\)"):
        llmk.nn.LayerNorm((3, 8))(torch.randn(2, 8, 3))
    with pytest.raises(ValueError, match="num_channels: expected a multiple of num_groups 5, got 12"):
        llmk.nn.GroupNorm(5, 12)
