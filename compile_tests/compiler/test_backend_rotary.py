"""Rotations as published models spell them: each against itself unrewritten, with gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.backend_checks import require_equal
from llmk.compiler import Report

Shapes = tuple[tuple[int, ...], ...]
SPELLINGS: dict[str, tuple[Callable[..., Any], Shapes]] = {}
"""The rotation of one tensor and the shapes of q, k and the angles, by name."""

TOKENS_FIRST, HEADS_FIRST = ((2, 5, 4, 8), (2, 5, 2, 8)), ((2, 4, 5, 8), (2, 2, 5, 8))
WIDER_THAN_ANGLES = (2, 4, 5, 12), (2, 2, 5, 12)


def spelling(heads: Shapes, *angles: tuple[int, ...]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def add(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        SPELLINGS[fn.__name__] = fn, (*heads, *angles)
        return fn

    return add


@spelling(TOKENS_FIRST, (5, 4), (5, 4))
def llama2_c(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours taken apart by unbind, put together by stack."""
    real, imaginary = x.float().reshape(2, 5, -1, 4, 2).unbind(-1)
    cos, sin = cos.view(1, 5, 1, 4), sin.view(1, 5, 1, 4)
    first, second = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack([first, second], dim=-1).flatten(3).type_as(x)


@spelling(TOKENS_FIRST, (5, 8), (5, 8))
def flux(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos[None, :, None] + rotated.float() * sin[None, :, None]).to(x.dtype)


@spelling(HEADS_FIRST, (5, 8), (5, 8))
def stable_audio(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Diffusers' other axis: halves taken apart by unbind."""
    real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    rotated = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cos[None, None] + rotated.float() * sin[None, None]).to(x.dtype)


@spelling(TOKENS_FIRST, (1, 5, 1, 4), (1, 5, 1, 4))
def nanochat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The other way round, the last axis by its number."""
    d = x.shape[3] // 2
    first, second = x[..., :d], x[..., d:]
    return torch.cat([first * cos + second * sin, first * (-sin) + second * cos], 3).to(x.dtype)


@spelling(TOKENS_FIRST, (5, 4), (5, 4))
def modded_nanogpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), 3).type_as(x)


@spelling(WIDER_THAN_ANGLES, (1, 5, 8))
def x_transformers(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """Part of the features, and a scale that is 1 without xPos."""
    angles = angles[:, -x.shape[-2] :, :].unsqueeze(1)
    x, rest = x[..., :8], x[..., 8:]
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    rotated = torch.stack((-imaginary, real), dim=-1).reshape(x.shape)
    turned = x * angles.cos() * scale + rotated * angles.sin() * scale
    return torch.cat((turned, rest), dim=-1).type(x.dtype)


@spelling(TOKENS_FIRST, (1, 5, 4), (1, 5, 4))
def gpt_j(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.repeat_interleave(angle[:, :, None, :], 2, 3) for angle in (cos, sin))
    even, odd = x[:, :, :, ::2], x[:, :, :, 1::2]
    return x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin


@spelling(WIDER_THAN_ANGLES, (1, 5, 8), (1, 5, 8))
def litgpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest, half = x[..., :8], x[..., 8:], 4
    rotated = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    cos, sin = (angle.view(1, 1, 5, 8) for angle in (cos, sin))
    return torch.cat((((part * cos) + (rotated * sin)).to(dtype=x.dtype), rest), dim=-1)


def of_queries_and_keys(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    fn = SPELLINGS[name][0]
    return lambda q, k, *angles: (fn(q, *angles), fn(k, *angles))


def arguments(shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, *angles = shapes
    return [*(torch.randn(x).to(dtype).requires_grad_() for x in (q, k)), *(torch.rand(x).to(dtype) for x in angles)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, dtype: torch.dtype) -> None:
    report = require_equal(of_queries_and_keys(name), arguments(SPELLINGS[name][1], dtype))
    assert report.replaced == {"rope": 1}, str(report)
    assert not report.left, str(report)


def wan(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Into slices of an empty tensor."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out


def test_features_written_in_place_are_left() -> None:
    """The report tells what is found, once for each tensor that is turned."""
    report: Report = require_equal(
        lambda q, k, *angles: (wan(q, *angles), wan(k, *angles)),
        arguments((*TOKENS_FIRST, (1, 5, 1, 4), (1, 5, 1, 4)), torch.float32),
    )
    assert report.replaced == {}
    assert [report.notes[note] for note in report.left if "torch.stack" in note.reason] == [2], str(report)
