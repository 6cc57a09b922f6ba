"""Hypothesis over shapes, strides, dtypes, options and the inputs that want gradients."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import llmk.ops.linear.linear_act
from llmk.opcheck.calls import call, differentiable_inputs, require_accurate
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
sizes = st.integers(1, 40)
vocabularies = st.one_of(sizes, st.integers(LONGEST_SHORT - 5, LONGEST_SHORT + 5))
layouts = st.sampled_from(["contiguous", "transposed", "slice", "expanded"])
few = settings(
    max_examples=3 if INTERPRET else 12,  # opcheck's search draws any number, of every operator
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: str) -> Tensor:
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


NORM = {"eps": [1e-6, 1e-2], "offset": [0.0, 1.0]}
OF_ROWS: dict[str, tuple[int, int, dict[str, list[Any]]]] = {
    "add": (2, 0, {}),
    "add_rms_norm": (2, 1, NORM),
    "geglu": (2, 0, {"approximate": ["tanh", "none"]}),
    "layer_norm": (1, 2, {"eps": [1e-5, 1e-2]}),
    "relu_squared": (1, 0, {}),
    "rms_norm": (1, 1, NORM),
    "swiglu": (2, 0, {}),
}
"""The operators of rows: how many tensors of them, how many parameters of a row's length, and the options' values."""


def options_of(data: st.DataObject, values: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: data.draw(st.sampled_from(each)) for name, each in values.items()}


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), N=sizes, layout=layouts)
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name, data, dtype, rows, N, layout, device: torch.device) -> None:
    """Gates and ups may be one packed tensor; a parameter has a dtype of its own, or is left out."""
    count, parameters, options = OF_ROWS[name]
    if name in ("swiglu", "geglu") and data.draw(st.booleans()):
        count, N = 1, 2 * N
    args: list[Any] = [tensor((*rows, N), dtype, device, data.draw(layouts) if i else layout) for i in range(count)]
    for _ in range(parameters):
        given = data.draw(st.booleans())
        args.append(tensor((N,), data.draw(dtypes), device, data.draw(layouts)) if given else None)
    check(name, tuple(args), options_of(data, options), data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, B=st.integers(1, 3), S=st.integers(1, 9), HK=st.integers(1, 3), layout=layouts)
@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_rotations(name, data, dtype, B, S, HK, layout, device: torch.device) -> None:
    HQ, R = HK * data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 12))
    D = R + data.draw(st.integers(0, 7))
    q, k = tensor((B, HQ, S, D), dtype, device, layout), tensor((B, HK, S, D), dtype, device, data.draw(layouts))
    has_norm = name == "qk_norm_rope"
    weights = [tensor((D,), data.draw(dtypes), device, data.draw(layouts)) for _ in range(2)] if has_norm else []
    angles = data.draw(dtypes) if has_norm else dtype
    cos = tensor((data.draw(st.sampled_from([1, B])), S, R), angles, device, "contiguous").clamp(-1, 1)
    options = options_of(data, {"interleaved": [False, True], **(NORM if has_norm else {})})
    check(name, (q, k, *weights, cos, cos.flip(-1)), options, data)


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
@given(data=st.data(), dtype=dtypes, M=sizes, V=vocabularies, layout=layouts)
def test_cross_entropy(data, dtype, M, V, layout, device: torch.device) -> None:
    target = targets(V, M, device)
    options = loss_options(data, V, device)
    check("cross_entropy", (2 * tensor((M, V), dtype, device, layout), target), options, data)


@pytest.mark.kernels
@settings(few, max_examples=few.max_examples // 3)  # each takes as long as ten of another operator
@given(data=st.data(), dtype=dtypes, N=sizes, H=sizes, V=sizes, layout=layouts)
@pytest.mark.parametrize("name", ["fused_linear_ce", "vocab_parallel_linear_ce"])
def test_fused_linear_ce(name, data, dtype, N, H, V, layout, device: torch.device) -> None:
    target = targets(V, N, device)
    options = loss_options(data, V, device) | {"chunk_size": data.draw(st.sampled_from([0, 1, 5, 64]))}
    if data.draw(st.booleans()):
        options["linear_bias"] = tensor((V,), dtype, device, data.draw(layouts))
    weight = tensor((V, H), dtype, device, data.draw(layouts)) / H**0.5
    check(name, (tensor((N, H), dtype, device, layout), weight, target), options, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, shape=st.lists(sizes, max_size=3), layout=layouts)
def test_softmax(data, dtype, shape, layout, device: torch.device) -> None:
    axes = max(len(shape), 1)
    dim = data.draw(st.integers(-axes, axes - 1))
    check("softmax", (3 * tensor(tuple(shape), dtype, device, layout if shape else "contiguous"), dim), {}, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), V=sizes, layout=layouts, logs=st.booleans())
def test_kl_div(data, dtype, rows, V, layout, logs, device: torch.device) -> None:
    x = -tensor((*rows, V), dtype, device, layout).abs()
    target = -tensor((*rows, V), dtype, device, data.draw(layouts)).abs()
    reduction = data.draw(st.sampled_from(["none", "sum", "mean", "batchmean"]))
    check("kl_div", (x, target if logs else target.exp()), {"reduction": reduction, "log_target": logs}, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, rows=st.lists(sizes, max_size=2), K=sizes, N=sizes, layout=layouts)
def test_linear_act(data, dtype, rows, K, N, layout, device: torch.device) -> None:
    """The results are right on the path that the sizes choose, and on the others that can do it."""
    args = [tensor((*rows, K), dtype, device, layout), tensor((N, K), dtype, device, data.draw(layouts)) / K**0.5]
    if data.draw(st.booleans()):
        args.append(tensor((N,), dtype, device, data.draw(layouts)))
    activation = data.draw(st.sampled_from(["none", "relu", "relu_squared", "gelu", "gelu_tanh", "silu"]))
    paths = ["chosen", "separate"] + ["fused"] * (dtype != torch.float32) + ["epilogue"] * (activation == "relu")
    path = data.draw(st.sampled_from(paths))
    chosen = llmk.ops.linear.linear_act.choose_path if path == "chosen" else lambda *_: path
    with mock.patch.object(llmk.ops.linear.linear_act, "choose_path", chosen):
        check("linear_act", tuple(args), {"activation": activation}, data)


@pytest.mark.kernels
@few
@given(data=st.data(), dtype=dtypes, B=sizes, G=st.integers(1, 4), C=st.integers(1, 6), layout=layouts)
def test_group_norm(data, dtype, B, G, C, layout, device: torch.device) -> None:
    x = tensor((B, G * C, *data.draw(st.lists(st.integers(1, 9), max_size=2))), dtype, device, layout)
    weight, bias = (
        tensor((G * C,), data.draw(dtypes), device, data.draw(layouts)) if data.draw(st.booleans()) else None
        for _ in range(2)
    )
    check("group_norm", (x, G, weight, bias, data.draw(st.sampled_from([1e-5, 1e-2]))), {}, data)


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
