"""Sums of matrix products: which of them are added up in one place, and that they are what they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import GraphModule

import llmk
from compile_tests.helpers.backend_checks import require_same
from llmk.compiler import Report, sums


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def accumulated(fn: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    """The function with its graphs' sums added up, run as they are; how many products were added to others."""

    def compiler(gm: GraphModule, example_inputs: Any) -> Any:
        sums.accumulate(gm.graph)
        gm.graph.lint()
        gm.recompile()
        found.append(sum(node.target is sums.add_product for node in gm.graph.nodes))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    return torch.compile(fn, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def of_rows_and_of_sequences(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, a), F.linear(x.view(-1, 8), b)


def four_in_pairs(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b + c @ d) + (b @ a + d @ c)


def sum_of_sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b + (b @ c + c @ a)


def product_returned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a @ b
    return product + b @ a, product.t()


def sum_on_the_way_returned(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Two of the three are a sum that nobody may change."""
    two = a @ b + b @ a
    return two, two + c @ a


def one_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b + a


def the_same_twice(a: Tensor, b: Tensor) -> Tensor:
    product = a @ b
    return product + product


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a @ b, b @ a, alpha=2)


def one_row_to_all(a: Tensor, b: Tensor) -> Tensor:
    return a @ b + a[:1] @ b


def wider(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).double() + (b @ a).double()


def read_by_what_is_pointwise(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b + b @ a).view(-1) * 0.3


SQUARE = (8, 8)
CASES: dict[Callable[..., Any], tuple[tuple[tuple[int, ...], ...], list[int]]] = {
    linears: (((2, 3, 8), (4, 8), (16, 8), (6, 8)), [0, 2]),
    of_rows_and_of_sequences: (((2, 3, 8), (4, 8), (4, 8)), [0, 1]),
    four_in_pairs: ((SQUARE,) * 4, [3, 4]),
    sum_of_sums: ((SQUARE,) * 3, [2, 3]),
    product_returned: ((SQUARE,) * 2, [0, 2]),
    sum_on_the_way_returned: ((SQUARE,) * 3, [1, 3]),
    one_product: ((SQUARE,) * 2, [0, 0]),
    the_same_twice: ((SQUARE,) * 2, [0, 0]),
    scaled: ((SQUARE,) * 2, [0, 2]),
    one_row_to_all: ((SQUARE,) * 2, [0, 1]),
    wider: ((SQUARE,) * 2, [0, 2]),
    read_by_what_is_pointwise: ((SQUARE,) * 2, [0, 2]),
}
"""The shapes of the arguments of each function, and how many products its two graphs add to others."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fn", CASES)
def test_sums(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    shapes, expected = CASES[fn]
    found: list[int] = []
    require_same(accumulated(fn, found), fn, tensors(dtype, *shapes))
    assert found == expected


def test_any_size() -> None:
    found: list[int] = []
    run = accumulated(linears, found)
    for length in (3, 5, 6):
        require_same(run, linears, tensors(torch.float32, (2, length, 8), (4, 8), (4, 8)))
    assert found == [0, 1, 0, 1]


@pytest.mark.usefixtures("no_cpp")
def test_through_inductor() -> None:
    """Inductor's own caches tell the rules apart."""
    args = tensors(torch.bfloat16, (2, 3, 8), (4, 8), (4, 8))
    calls, asked = [], []
    with fresh_cache():
        for without in ([], [], [sums.NAME]):
            torch._dynamo.reset()
            counters.clear()
            run = llmk.compile(linears, report=Report(), without=without)
            _, codes = run_and_get_code(require_same, run, linears, args)
            calls.append(sum(code.count("_add_product_.default(") for code in codes))
            asked.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")])
    assert asked == [[0, 1], [1, 0], [0, 1]]
    assert [calls[0], calls[2]] == [1, 0]


@pytest.mark.usefixtures("no_cpp")
def test_products_that_inductor_adds_by_itself() -> None:
    """Inductor alone takes `addmm`, which copies what it adds to, where no view is between."""
    args = tensors(torch.float32, (3, 8), (4, 8), (4, 8), (2, 8))
    torch._dynamo.reset()
    run = llmk.compile(linears, report=Report())
    _, codes = run_and_get_code(require_same, run, linears, args)
    assert sum(code.count("_add_product_.default(") for code in codes) == 2
    assert not any("addmm" in code for code in codes)


@pytest.mark.usefixtures("no_cpp")
def test_beside_a_pass_of_the_users() -> None:
    seen: list[int] = []

    def look(graph: torch.fx.Graph) -> None:
        seen.append(sum(node.target is sums.add_product for node in graph.nodes))

    args = tensors(torch.float32, (3, 8), (4, 8), (4, 8))
    torch._dynamo.reset()
    run = llmk.compile(linears, report=Report(), options={"post_grad_custom_post_pass": look})
    _, codes = run_and_get_code(require_same, run, linears, args)
    assert seen == [0, 0]
    assert sum(code.count("_add_product_.default(") for code in codes) == 1
