"""Rotary position embeddings in plain PyTorch."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from compile_tests.spellings.registry import angles, spelling, turns

HEADS = (1, 2, 6, 8), (1, 2, 6, 8)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    return x * cos + rotate(x) * sin


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), angles(1, 5, 8), angles(1, 5, 8))
def hugging_face_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turn(q.transpose(1, 2), cos, sin), turn(k.transpose(1, 2), cos, sin)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), angles(1, 5, 8), angles(1, 5, 8))
def rope_before_heads_come_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return turn(q, cos, sin), turn(k, cos, sin)


@spelling("rope", (2, 5, 4, 12), (2, 5, 2, 12), angles(1, 5, 8), angles(1, 5, 8))
def partial_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    heads = (x.transpose(1, 2) for x in (q, k))
    return tuple(torch.cat((turn(x[..., :8], cos, sin), x[..., 8:]), dim=-1) for x in heads)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), angles(1, 5, 8), angles(1, 5, 8))
def rope_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return tuple(turn(x.transpose(1, 2).float(), cos, sin).to(x.dtype) for x in (q, k))


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), angles(1, 5, 8), angles(1, 5, 8))
def rope_of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(turn(x.transpose(1, 2), cos, sin, rotate_pairs) for x in (q, k))


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), angles(1, 5, 8), angles(1, 5, 8))
def rope_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = (x.transpose(1, 2).chunk(2, dim=-1) for x in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves)


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), angles(1, 5, 8), angles(1, 5, 8))
def rope_of_pairs_into_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = ((x.transpose(1, 2)[..., ::2], x.transpose(1, 2)[..., 1::2]) for x in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in pairs)


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), angles(1, 5, 8), angles(1, 5, 8))
def rope_with_angles_brought_into_shape_twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        wide = (y[:, :, None, :].repeat_interleave(2, 3) for y in (cos, sin))
        return turn(x, *wide, rotate=rotate_pairs)

    return turned(q), turned(k)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), turns(5, 4))
def complex_rope(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pairs = [torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    angles = angles.view(1, 5, 1, 4)
    return tuple(torch.view_as_real(x * angles).flatten(3).type_as(q) for x in pairs)


def neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.unflatten(2, (-1, 2)).unbind(-1)
    return (x.float() * c + torch.stack([-b, a], dim=-1).flatten(2).float() * s).to(x.dtype)


@spelling("rope", *HEADS, angles(5, 8), angles(5, 8))
def eva_02(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """A prefix that stays."""
    q = torch.cat([q[:, :, :1], turn(q[:, :, 1:], c, s)], 2)
    k = torch.cat([k[:, :, :1], turn(k[:, :, 1:], c, s)], 2)
    return q @ k.mT


@spelling("rope", *HEADS, angles(1, 5, 16))
def timm(q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """The same, with angles that are taken apart and expanded for each."""

    def turned_by_pairs(x: Tensor) -> Tensor:
        sin, cos = (part.unsqueeze(1).expand_as(x) for part in angles.tensor_split(2, -1))
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin

    q = torch.cat([q[:, :, :1], turned_by_pairs(q[:, :, 1:])], 2).type_as(k)
    return q @ torch.cat([k[:, :, :1], turned_by_pairs(k[:, :, 1:])], 2).mT


@spelling("rope", *HEADS, angles(6, 8), angles(6, 8))
def keys_made_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turn(q, c, s) * 2
    return q, turn(k.tanh(), c, s)


@spelling("rope", (3, 5, 8), (3, 5, 8), angles(5, 8), angles(5, 8))
def fair_esm(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Heads in the batch."""
    return turn(q, c[None], s[None]), turn(k, c[None], s[None])


@spelling("rope", (3, 5, 16), (3, 5, 16), angles(3, 5, 16), angles(3, 5, 16))
def ltx(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys before heads are told apart."""
    return neighbours(q, c, s), neighbours(k, c, s)


TOKENS_FIRST, HEADS_FIRST = ((2, 5, 4, 8), (2, 5, 2, 8)), ((2, 4, 5, 8), (2, 2, 5, 8))
WIDER_THAN_ANGLES = (2, 4, 5, 12), (2, 2, 5, 12)


def rotation(
    heads: tuple[tuple[int, ...], ...], *shapes: tuple[int, ...]
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the rotation of one tensor for queries and keys, by angles of these shapes."""

    def add(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(fn)
        def of_queries_and_keys(q: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
            return fn(q, *angles), fn(k, *angles)

        spelling("rope", *heads, *(angles(*shape) for shape in shapes))(of_queries_and_keys)
        return fn

    return add


@rotation(TOKENS_FIRST, (5, 4), (5, 4))
def llama2_c(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours taken apart by unbind, put together by stack."""
    real, imaginary = x.float().reshape(2, 5, -1, 4, 2).unbind(-1)
    cos, sin = cos.view(1, 5, 1, 4), sin.view(1, 5, 1, 4)
    first, second = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack([first, second], dim=-1).flatten(3).type_as(x)


@rotation(TOKENS_FIRST, (5, 8), (5, 8))
def flux(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos[None, :, None] + rotated.float() * sin[None, :, None]).to(x.dtype)


@rotation(HEADS_FIRST, (5, 8), (5, 8))
def stable_audio(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Diffusers' other axis: halves taken apart by unbind."""
    real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    rotated = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cos[None, None] + rotated.float() * sin[None, None]).to(x.dtype)


@rotation(TOKENS_FIRST, (1, 5, 1, 4), (1, 5, 1, 4))
def nanochat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The other way round, the last axis by its number."""
    d = x.shape[3] // 2
    first, second = x[..., :d], x[..., d:]
    return torch.cat([first * cos + second * sin, first * (-sin) + second * cos], 3).to(x.dtype)


@rotation(TOKENS_FIRST, (5, 4), (5, 4))
def modded_nanogpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), 3).type_as(x)


@rotation(WIDER_THAN_ANGLES, (1, 5, 8))
def x_transformers(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """Part of the features, and a scale that is 1 without xPos."""
    angles = angles[:, -x.shape[-2] :, :].unsqueeze(1)
    x, rest = x[..., :8], x[..., 8:]
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    rotated = torch.stack((-imaginary, real), dim=-1).reshape(x.shape)
    turned = x * angles.cos() * scale + rotated * angles.sin() * scale
    return torch.cat((turned, rest), dim=-1).type(x.dtype)


@rotation(TOKENS_FIRST, (1, 5, 4), (1, 5, 4))
def gpt_j(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.repeat_interleave(angle[:, :, None, :], 2, 3) for angle in (cos, sin))
    even, odd = x[:, :, :, ::2], x[:, :, :, 1::2]
    return x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin


@rotation(WIDER_THAN_ANGLES, (1, 5, 8), (1, 5, 8))
def litgpt(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest, half = x[..., :8], x[..., 8:], 4
    rotated = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    cos, sin = (angle.view(1, 1, 5, 8) for angle in (cos, sin))
    return torch.cat((((part * cos) + (rotated * sin)).to(dtype=x.dtype), rest), dim=-1)
