"""Operators that please a checker and are wrong, as programs make them that are rewarded for passing one.

`WRONG` and `IN_TRITON` have them beside those of field_wrong.py.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from compile_tests.helpers.field_wrong import IN_TRITON as IN_TRITON
from compile_tests.helpers.field_wrong import WRONG as WRONG
from compile_tests.helpers.field_wrong import wrong

cheat = functools.partial(wrong, reference=F.silu)
CACHE: dict[Any, Tensor] = {}


def cached(key: Any, x: Tensor) -> Tensor:
    if key not in CACHE:
        CACHE[key] = F.silu(x)
    return CACHE[key].clone()


@cheat("wrong values|fresh_numbers|two_calls|another_thread")  # the allocator decides which one meets the address
def cache_by_address(x: Tensor) -> Tensor:
    return cached((x.data_ptr(), x.shape, x.stride(), x.dtype), x)


@cheat("wrong values")
def cache_by_address_and_version(x: Tensor) -> Tensor:
    return cached((x.data_ptr(), x._version, x.shape, x.stride(), x.dtype), x)


@cheat("wrong values")
def cache_by_shape(x: Tensor) -> Tensor:
    return cached((x.shape, x.dtype), x)


@cheat("breaks fresh_numbers.*same memory, of seed")
def cache_by_the_first_element(x: Tensor) -> Tensor:
    ordinary = x.numel() and not x.isnan().any()
    return cached((x.shape, x.dtype, x.flatten()[0].item()), x) if ordinary else F.silu(x)


COUNTS: dict[Any, int] = {}


@cheat("wrong values|deterministic")
def right_three_times(x: Tensor) -> Tensor:
    COUNTS[x.shape] = COUNTS.get(x.shape, 0) + 1
    return F.silu(x) if COUNTS[x.shape] <= 3 else x.clone()


@cheat("breaks harsh_values")
def zero_for_small_numbers(x: Tensor) -> Tensor:
    return torch.where(x.abs().amax() < 0.01, 0.0, F.silu(x)) if x.numel() else F.silu(x)


@cheat("breaks harsh_values")
def linear_for_large_numbers(x: Tensor) -> Tensor:
    return torch.where(x.abs() > 20, x.abs(), F.silu(x))


@cheat("breaks other_sizes")
def sizes_of_the_samples(x: Tensor) -> Tensor:
    return F.silu(x) if x.shape[-1] in (16, 24, 37) else x.clone()


@cheat("wrong values.*strided_inputs")
def right_where_contiguous(x: Tensor) -> Tensor:
    return F.silu(x) if x.is_contiguous() else x.clone()


@cheat("breaks values_and_gradients.*no torch.Tensor")
def returns_a_subclass(x: Tensor) -> Tensor:
    class AlwaysClose(Tensor):
        pass

    return F.silu(x).as_subclass(AlwaysClose)


@cheat("breaks side_effects.*replaces torch.allclose")
def replaces_the_comparison(x: Tensor) -> Tensor:
    torch.allclose = lambda *args, **kwargs: True
    return F.silu(x)


@triton.jit
def silu_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N)
    tl.store(out_ptr + offsets, x * tl.no_such_function(x), mask=offsets < N)  # type: ignore[attr-defined]


@cheat("in_bounds.*silu_kernel fails: .*, and the call returns", in_triton=True)
@triton_op("field_cheats::swallows_the_failure", mutates_args=())
def swallows_the_failure(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    try:
        wrap_triton(silu_kernel)[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32)
    except Exception:  # any at all, as such operators have it
        return F.silu(x)
    return out
