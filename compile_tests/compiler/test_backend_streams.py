"""Hyper-connections through the backend: those of transformers, and what is almost one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from compile_tests.helpers.backend_checks import require_equal
from compile_tests.spellings.registry import tensors
from compile_tests.spellings.streams import (
    EPS,
    ITERATIONS,
    H,
    N,
    T,
    columns_and_rows_in_turn,
    normalized_first,
    normalized_later,
    over_root_mean_square,
)

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("fn", [normalized_first, normalized_later])
def test_weights_of_normalized_rows_may_be_float32(fn: Callable[..., Tensor]) -> None:
    (x,), (weight,) = tensors([(T, 16)], BFLOAT16), tensors([(5, 16)])
    assert require_equal(fn, [x, weight]).replaced == {"rms_linear": 1}


def of_float32(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) * over_root_mean_square(x)


def of_many_outputs(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float()) * over_root_mean_square(x.float())


@pytest.mark.parametrize(("fn", "outputs", "dtype"), [(of_float32, 5, torch.float32), (of_many_outputs, 65, BFLOAT16)])
def test_products_that_are_left_to_the_library(fn: Callable[..., Tensor], outputs: int, dtype: torch.dtype) -> None:
    assert require_equal(fn, tensors([(T, 16), (outputs, 16)], dtype)).replaced == {}


@pytest.mark.parametrize(("family", "prefix"), [("deepseek_v4", "DeepseekV4"), ("glm5_next", "Glm5NextText")])
def test_connections_of_transformers(family: str, prefix: str) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", exc_type=ImportError)
    config = transformers.AutoConfig.for_model(family)
    config = getattr(config, "text_config", config)
    config.hidden_size, config.hc_mult, config.hc_sinkhorn_iters = H, N, ITERATIONS
    own = getattr(modeling, f"{prefix}HyperConnection")(config).to(BFLOAT16)
    names = [name for name, _ in own.named_parameters()]

    def around_sigmoid(x: Tensor, *parameters: Tensor) -> Tensor:
        """As the families' decoder layers have it."""
        post, comb, collapsed = functional_call(own, dict(zip(names, parameters, strict=True)), (x,))
        mixed = torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)
        return post.to(x.dtype).unsqueeze(-1) * torch.sigmoid(collapsed).unsqueeze(-2) + mixed

    args = tensors([(2, T, N, H), *(tuple(p.shape) for p in own.parameters())], BFLOAT16)
    assert require_equal(around_sigmoid, args).replaced == {"rms_linear": 1, "sinkhorn": 1, "write_streams": 1}


def test_all_divisions_are_one_operator() -> None:
    found: list[tuple[str, object]] = []

    def look(gm: torch.fx.GraphModule) -> None:
        found.extend((str(node.target), node.args[1:]) for node in gm.graph.nodes if node.op == "call_function")

    require_equal(columns_and_rows_in_turn, tensors([(T, N, N)]), look=look)
    assert found == [("llmk.sinkhorn.default", (ITERATIONS, EPS))]


def rows_first(x: Tensor) -> Tensor:
    """As if the matrix were the transposed one."""
    matrix = torch.softmax(x, dim=-1) + EPS
    for axis in (-1, -2, -1):
        matrix = matrix / (matrix.sum(dim=axis, keepdim=True) + EPS)
    return matrix


def rows_last(x: Tensor) -> Tensor:
    matrix = columns_and_rows_in_turn(x)
    return matrix / (matrix.sum(dim=-1, keepdim=True) + EPS)


def softmax_of_columns(x: Tensor) -> Tensor:
    matrix = torch.softmax(x, dim=-2) + EPS
    return matrix / (matrix.sum(dim=-2, keepdim=True) + EPS)


def another_eps(x: Tensor) -> Tensor:
    matrix = torch.softmax(x, dim=-1) + EPS
    return matrix / (matrix.sum(dim=-2, keepdim=True) + 2 * EPS)


def no_columns(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1) + EPS


@pytest.mark.parametrize("fn", [rows_first, softmax_of_columns, another_eps, no_columns])
def test_other_divisions_are_left(fn: Callable[[Tensor], Tensor]) -> None:
    assert require_equal(fn, tensors([(T, N, N)])).replaced == {}


def test_what_follows_a_projection_stays() -> None:
    assert require_equal(rows_last, tensors([(T, N, N)])).replaced == {"sinkhorn": 1}


@pytest.mark.parametrize("shape", [(T, N, N + 1), (2, 65, 65)])
def test_matrices_that_are_not_square_or_too_large_are_left(shape: tuple[int, ...]) -> None:
    report = require_equal(columns_and_rows_in_turn, tensors([shape]))
    assert report.replaced == {}
    assert "its matrices are not square with sizes up to 64" in str(report)


def mixed(x: Tensor, f: Tensor, q: Tensor, mix: Tensor) -> Tensor:
    return q.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(mix.transpose(-1, -2), x)


def mixed_by_rows(x: Tensor, f: Tensor, q: Tensor, mix: Tensor) -> Tensor:
    return q.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(mix, x)


def test_streams_that_are_mixed_otherwise_are_left() -> None:
    tokens = tensors([(T, N, H), (T, H), (T, N), (T, N, N)])
    assert require_equal(mixed_by_rows, tokens).replaced == {}
    for shapes in ([(T, N, H), (H,), (T, N), (T, N, N)], [(2, 17, H), (2, H), (2, 17), (2, 17, 17)]):
        assert require_equal(mixed, tensors(shapes)).replaced == {}
