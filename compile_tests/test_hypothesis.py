"""Hypothesis over shapes, strides, dtypes, options and the inputs that want gradients."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmk.opcheck.calls import call, differentiable_inputs, require_accurate
from llmk.registry import OPS, Sample
from llmk.registry.launch import INTERPRET

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sizes = st.integers(1, 40)
layouts = st.sampled_from(["contiguous", "transposed", "slice", "expanded"])
few = settings(
    max_examples=15 if INTERPRET else 60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: str) -> Tensor:
    """Normal numbers, laid out in memory in one of four ways."""
    generator = torch.Generator().manual_seed(sum(shape))  # the same for the same example, whatever came before

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    if layout == "transposed" and len(shape) > 1:
        return randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "slice":
        return randn(*shape[:-1], 2 * shape[-1] + 3)[..., 2 : 2 + shape[-1]]
    if layout == "expanded" and len(shape) > 1:
        return randn(1, *shape[1:]).expand(shape)
    return randn(*shape)


def targets(V: int, count: int, device: torch.device) -> Tensor:
    return torch.randint(0, V, (count,), generator=torch.Generator().manual_seed(V)).to(device)


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], data: st.DataObject) -> None:
    op, sample = OPS[name], Sample(args, kwargs, str(kwargs))
    wanted = data.draw(st.sets(st.sampled_from(differentiable_inputs(op, sample))))
    require_accurate(op, sample, call(op, sample, sorted(wanted)))


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), N=sizes, layout=layouts, affine=st.booleans())
def test_rms_norm(data, dtype, rows, N, layout, affine, device: torch.device) -> None:
    x = tensor((*rows, N), dtype, device, layout)
    weight = tensor((N,), data.draw(dtypes), device, data.draw(layouts)) if affine else None
    options = {"eps": data.draw(st.sampled_from([1e-6, 1e-2])), "offset": data.draw(st.sampled_from([0.0, 1.0]))}
    check("rms_norm", (x, weight), options, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), N=sizes, layout=layouts, packed=st.booleans())
def test_swiglu(data, dtype, rows, N, layout, packed, device: torch.device) -> None:
    if packed:
        check("swiglu", (tensor((*rows, 2 * N), dtype, device, layout),), {}, data)
    else:
        up = tensor((*rows, N), dtype, device, data.draw(layouts))
        check("swiglu", (tensor((*rows, N), dtype, device, layout), up), {}, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, B=st.integers(1, 3), S=st.integers(1, 9), HK=st.integers(1, 3), layout=layouts)
def test_rope(data, dtype, B, S, HK, layout, device: torch.device) -> None:
    HQ, R = HK * data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 12))
    D = R + data.draw(st.integers(0, 7))
    q, k = tensor((B, HQ, S, D), dtype, device, layout), tensor((B, HK, S, D), dtype, device, data.draw(layouts))
    cos_shape = (data.draw(st.sampled_from([1, B])), S, R)
    cos, sin = (tensor(cos_shape, dtype, device, "contiguous").clamp(-1, 1) for _ in range(2))
    check("rope", (q, k, cos, sin), {"interleaved": data.draw(st.booleans())}, data)


def loss_options(data: st.DataObject, V: int, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "reduction": data.draw(st.sampled_from(["none", "sum", "mean"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "softcap": data.draw(st.sampled_from([0.0, 5.0])),
        "z_loss": data.draw(st.sampled_from([0.0, 1e-2])),
        "ignore_index": data.draw(st.sampled_from([-100, 0, V - 1])),
    }
    if data.draw(st.booleans()):
        options["weight"] = torch.linspace(0.5, 1.5, V, device=device)
    return options


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, M=sizes, V=sizes, layout=layouts)
def test_cross_entropy(data, dtype, M, V, layout, device: torch.device) -> None:
    target = targets(V, M, device)
    options = loss_options(data, V, device)
    check("cross_entropy", (2 * tensor((M, V), dtype, device, layout), target), options, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, N=sizes, H=sizes, V=sizes, layout=layouts)
def test_fused_linear_ce(data, dtype, N, H, V, layout, device: torch.device) -> None:
    target = targets(V, N, device)
    options = loss_options(data, V, device) | {"chunk_size": data.draw(st.sampled_from([0, 1, 5, 64]))}
    if data.draw(st.booleans()):
        options["linear_bias"] = tensor((V,), dtype, device, data.draw(layouts))
    weight = tensor((V, H), dtype, device, data.draw(layouts)) / H**0.5
    check("fused_linear_ce", (tensor((N, H), dtype, device, layout), weight, target), options, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), layout=layouts)
def test_giou_loss(data, dtype, rows, layout, device: torch.device) -> None:
    """Normal numbers for corners: many boxes are inverted, and half of the targets are padding."""
    boxes, targets = tensor((*rows, 4), dtype, device, layout), tensor((*rows, 4), data.draw(dtypes), device, "slice")
    options = {
        "reduction": data.draw(st.sampled_from(["none", "sum", "mean"])),
        "eps": data.draw(st.sampled_from([1e-5, 1e-2])),
    }
    check("giou_loss", (boxes, targets.flip(0)), options, data)
