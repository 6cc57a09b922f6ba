"""What the backend finds, in every spelling, and functions that are almost one: against themselves unrewritten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_equal
from compile_tests.helpers.breadth import some_of
from compile_tests.spellings.every import SPELLINGS
from compile_tests.spellings.losses import H, N, V, at_their_places
from compile_tests.spellings.norms import EPS, mean_square
from compile_tests.spellings.registry import angles, classes, tensors
from compile_tests.spellings.rotations import turn


@pytest.mark.parametrize("dtype", some_of([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_found(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 a graph has the casts too, which in float32 change nothing."""
    spelling = SPELLINGS[name]
    report = require_equal(spelling.fn, tensors(spelling.inputs, dtype))
    assert report.replaced == {spelling.operator: 1}, str(report)
    # Logits that no linear layer gives are noted.
    assert not report.left or spelling.operator == "cross_entropy", str(report)


@pytest.mark.parametrize("negative", [False, True])
def test_classes_at_their_places_count_from_the_end(negative: bool) -> None:
    """Indices count from the end, and targets of an operator do not."""
    x, v, t = tensors(SPELLINGS["at_their_places"].inputs)
    report = require_equal(at_their_places, [x, v, t - V * negative])
    assert report.replaced == {"linear_logprobs": 1}


LEFT: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {}
"""Words of the report, what is no such spelling, and the shapes of its arguments, by name."""


def left(words: str, *shapes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        LEFT[fn.__name__] = words, fn, shapes
        return fn

    return add


@left("rms_norm: rsqrt: what is computed around it is no norm", (N, H))
def sum_over_another_number(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / (H - 1) + EPS)


@left("rms_norm: sqrt: what is computed around it is no norm", (N, H))
def two_over_the_root(x: Tensor) -> Tensor:
    return x * (2 / (mean_square(x) + EPS).sqrt())


@left("", (H, H))
def no_axis_put_back(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + EPS)


@left("rms_norm: pow: what is computed around it is no norm", (N, H))
def variance_of_a_sample(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * (var + EPS) ** -0.5


@left("rms_norm_gated: llmk::rms_norm: it has a gate", (N, H), (N, H), (4,))
def one_weight_for_all_groups(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm((x * F.silu(g)).view(N, 2, 4), (4,), w, EPS).view(N, H)


@left("rms_norm_gated: llmk::rms_norm: rms_norm on the way is read elsewhere too", (N, H), (N, H), (H,))
def read_between_the_norm_and_the_gate(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = F.rms_norm(x, (H,), w, EPS)
    return y * F.silu(g) + y


@left("fused_linear_ce", (N, 2, 4), (V, 2, 4), classes(N))
def einsum_over_two_axes(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nad,vad->nv", x, v), t)


@left("fused_linear_ce", (N, H), (V, H), (V,), classes(N))
def addmm_of_twice_the_bias(x: Tensor, v: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, x, v.t(), beta=2), t)


@left("fused_linear_ce", (2, N, H), (2, V, H), classes(2, N))
def a_matrix_for_each_batch(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ v.mT).view(-1, V), t.view(-1))


@left("something that it reads is written in place", (N, H), (N, H))
def activated_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Into memory that stays as it was, where a unit takes the activation in."""
    return F.silu(x * 2, inplace=True) * y


@left("mul_ on the way is read elsewhere too", (N, H), (V, H), classes(N))
def read_and_scaled_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return F.cross_entropy(z.mul_(0.5), t) + z.sum()


@left("linear_logprobs: index: its logits are not", (N, H), (V, H), classes(N))
def other_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N).flip(0), t]


@left("linear_logprobs: index: its logits are not", (N, H), (V, H), classes(N))
def places_of_fewer_rows(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N - 1), t[1:]]


@left("is not over the last axis", (V, H), (V, H), classes(V))
def along_another_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.take_along_dim(F.linear(x, v).log_softmax(-1), t[None], 0)


@left("linear_logprobs: logsumexp: its logits are not", (2, 3, H), (V, H), classes(2, 3))
def rows_in_another_order(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t[..., None]).squeeze(-1) - torch.stack([z[1].logsumexp(-1), z[0].logsumexp(-1)])


@left("linear_logprobs: gather: linear on the way is read elsewhere too", (3, 3, H), (V, H), classes(3, 3))
def rows_over_another_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return torch.stack([row.log_softmax(0).gather(-1, i) for row, i in zip(z, t.unsqueeze(-1), strict=True)])


@left("linear_logprobs: logsumexp: its logits are not", (N, H), classes(N))
def of_no_layer(x: Tensor, t: Tensor) -> Tensor:
    return (x.logsumexp(-1) - x.gather(-1, (t % H)[:, None]).squeeze(-1)).mean()


@left(
    "one of its results is read before all that it takes is there",
    (1, 2, 6, 8),
    (1, 2, 6, 8),
    angles(6, 8),
    angles(6, 8),
)
def keys_made_of_turned_queries(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turn(q, c, s)
    return q, turn(k + q, c, s)


@left(
    "one of its results is read before all that it takes is there",
    (1, 2, 6, 8),
    (1, 2, 6, 8),
    angles(6, 8),
    angles(6, 8),
)
def keys_written_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    keys = k * 2
    q = turn(q, c, s) * 2
    keys.add_(q)
    return q, turn(keys * 2, c, s)


@left(
    "one of its results is read before all that it takes is there",
    (1, 2, 6, 8),
    (1, 2, 6, 8),
    angles(6, 8),
    angles(6, 8),
)
def keys_drawn_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turn(q, c, s) * 2
    return q, turn(torch.dropout(k, 0.0, True), c, s)


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    """A function that is almost such a spelling is left, with a word in the report."""
    words, fn, shapes = LEFT[name]
    report = require_equal(fn, tensors(shapes))
    wanted = {"rms_norm", "layer_norm", "rms_norm_gated", "fused_linear_ce", "linear_logprobs", "rope"}
    allowed = {"rms_norm"} if words.startswith("rms_norm_gated") else set()
    assert not (wanted - allowed) & set(report.replaced), str(report)
    assert any(words in f"{note.operator}: {note.reason}" for note in report.left) or not words, str(report)


def wan(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Into slices of an empty tensor."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out


def test_features_written_in_place_are_left() -> None:
    """The report tells what is found, once for each tensor that is turned."""
    report = require_equal(
        lambda q, k, *angles: (wan(q, *angles), wan(k, *angles)),
        tensors([(2, 5, 4, 8), (2, 5, 2, 8), *[angles(1, 5, 1, 4)] * 2]),
    )
    assert report.replaced == {}
    assert [report.notes[note] for note in report.left if "torch.stack" in note.reason] == [2], str(report)
