"""Short causal convolutions that the backend finds, and others that look like one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_tests.helpers.backend_checks import require_equal, require_same_step, rewriting
from compile_tests.helpers.backend_compare import require_unchanged
from compile_tests.spellings.convolutions import FORMS, B, D, Form, K, T, padded
from llmk.compiler import Report


def made(channels_last: bool, taps: int = K) -> list[Tensor]:
    x = torch.randn(B, T, D).transpose(1, 2) if channels_last else torch.randn(B, D, T)
    return [x.requires_grad_() for x in (x, torch.randn(D, 1, taps), torch.randn(D))]


@pytest.mark.parametrize("form", FORMS)
def test_found_with_channels_last(form: str) -> None:
    report = require_equal(FORMS[form], made(channels_last=True))
    assert report.replaced == {"causal_conv1d": 1}, str(report)


@pytest.mark.parametrize("form", ["cut", "cut, silu", "silu, cut", "exchanged", "padded"])
def test_layout_in_memory_stays(form: str) -> None:
    """And through AOTAutograd, eager beside it."""
    report = require_unchanged(FORMS[form], made(channels_last=True))
    assert report.replaced == {"causal_conv1d": 1}, str(report)


@pytest.mark.parametrize("taps", [2, 8])
def test_as_many_taps_as_the_operator_takes(taps: int) -> None:
    assert require_equal(FORMS["cut, silu"], made(True, taps)).replaced == {"causal_conv1d": 1}


LOOKALIKES: dict[str, tuple[Form, str]] = {
    "centered": (lambda x, w, b: F.conv1d(F.pad(x, (2, 1)), w, b, groups=D), "zeros on the left"),
    "the future": (lambda x, w, b: F.conv1d(F.pad(x, (0, 3)), w, b, groups=D), "zeros on the left"),
    "same": (lambda x, w, b: F.conv1d(x, w, b, padding="same", groups=D), "zeros before the first"),
    "too few zeros": (lambda x, w, b: F.conv1d(F.pad(x, (2, 0)), w, b, groups=D), "2 zeros before"),
    "too many zeros": (lambda x, w, b: F.conv1d(F.pad(x, (4, 0)), w, b, groups=D)[..., :T], "4 zeros before"),
    "twice padded": (lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, padding=3, groups=D)[..., :T], "zeros on"),
    "channels padded": (lambda x, w, b: F.conv1d(F.pad(x[:, 1:], (3, 0, 1, 0)), w, b, groups=D), "zeros on the left"),
    "ones": (lambda x, w, b: F.conv1d(F.pad(x, (3, 0), value=1.0), w, b, groups=D), "zeros on the left"),
    "reflected": (lambda x, w, b: F.conv1d(F.pad(x, (3, 0), "reflect"), w, b, groups=D), ""),
    "replicated": (lambda x, w, b: F.conv1d(F.pad(x, (3, 0), "replicate"), w, b, groups=D), ""),
    "dilated": (lambda x, w, b: F.conv1d(F.pad(x, (6, 0)), w, b, dilation=2, groups=D), "its dilation 2"),
    "strided": (lambda x, w, b: F.conv1d(F.pad(x, (3, 0)), w, b, stride=2, groups=D), ""),
    "cut in front": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D)[..., 3:], ""),
    "cut in the middle": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D)[..., 1 : T + 1], ""),
    "cut too short": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D)[..., : T - 1], "not as long"),
    "cut too late": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D)[..., : T + 1], "not as long"),
    "whole": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D), "not as long"),
    "every other token": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=D)[..., : 2 * T : 2], ""),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_left(name: str) -> None:
    form, why = LOOKALIKES[name]
    report = require_equal(form, made(channels_last=False))
    assert not report.replaced, str(report)
    assert why in str(report)


@pytest.mark.parametrize(("groups", "taps"), [(1, 4), (12, 4), (24, 9), (24, 1)])
def test_other_sizes_are_left(groups: int, taps: int) -> None:
    """Channels that are mixed, and as many taps as the operator does not take."""
    x, w, b = torch.randn(B, D, T), torch.randn(D, D // groups, taps), torch.randn(D)
    args = [tensor.requires_grad_() for tensor in (x, w, b)]
    report = require_equal(lambda x, w, b: F.conv1d(F.pad(x, (taps - 1, 0)), w, b, groups=groups), args)
    assert not report.replaced


def test_two_filters_for_each_channel_are_left() -> None:
    args = [torch.randn(B, D, T), torch.randn(2 * D, 1, K), torch.randn(2 * D)]
    assert not require_equal(padded, [x.requires_grad_() for x in args]).replaced


def test_what_is_read_before_the_activation_keeps_it_outside() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = padded(x, w, b)
        return y, F.silu(y)

    assert require_equal(fn, made(True)).replaced == {"causal_conv1d": 1}  # without its activation


class Mixer(nn.Module):
    """A loss of the beginning of transformers' Mamba-2: the projection, the convolution, the activation, the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(16, D)
        self.conv1d = nn.Conv1d(D, D, K, groups=D, padding=K - 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1d(self.in_proj(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        a, b, c = F.silu(y).split([8, 8, 8], dim=-1)
        return (a * b + c).square().sum()


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_module_in_every_length(dynamic: bool | None) -> None:
    """Forward and backward; a second length, which makes sizes symbolic, is found too."""
    torch.manual_seed(0)
    model, report = Mixer(), Report()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=rewriting(report), dynamic=dynamic)
    for batch, length in ((2, 9), (3, 17), (1, 40)):
        require_same_step(model, compiled, [torch.randn(batch, length, 16)])
    assert set(report.replaced) == {"causal_conv1d"}
    assert not report.left, str(report)


def test_transformers_fallback() -> None:
    modeling: Any = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = modeling.causal_conv1d_fn(x.transpose(1, 2), w.squeeze(1), None, activation="silu")
        return y.transpose(1, 2)

    args = [torch.randn(B, T, D, requires_grad=True), torch.randn(D, 1, K, requires_grad=True)]
    assert require_equal(fn, args).replaced == {"causal_conv1d": 1}
