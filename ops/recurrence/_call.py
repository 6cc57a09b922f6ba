"""Checks of a call, its cost, and samples, which the operators of this family share."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.recurrence import LARGEST_KEY, LARGEST_VALUE
from llmk.ops.recurrence._chunks import Call
from llmk.registry import Cost, check_dtype, check_finite, check_parameter, check_same, check_shape


def check_call(call: Call, axes: str = "B, T", state: str = "initial_state") -> None:
    """Check a call. `axes` are those before the heads, and `state` is the name of the argument that is the state."""
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    check_dtype("q", q)
    dims = 3 + axes.count(",")
    if q.dim() != dims or not 1 <= q.shape[-1] <= LARGEST_KEY or q.shape[-2] == 0:
        expected = f"[{axes}, HK, K] with HK at least 1 and K from 1 to {LARGEST_KEY}"
        raise ValueError(f"q: expected shape {expected}, got {tuple(q.shape)}")
    check_shape("k", k, q.shape, "the shape of q")
    check_same("k", k, "q", q, dtype=True)
    (*tokens, HK, K), V = q.shape, v.shape[-1] if v.dim() else 0
    if v.dim() != dims or list(v.shape[:-2]) != tokens or not 1 <= V <= LARGEST_VALUE:
        expected = f"[{', '.join(map(str, tokens))}, H, V] with V from 1 to {LARGEST_VALUE} to fit q"
        raise ValueError(f"v: expected shape {expected}, got {tuple(v.shape)}")
    H = v.shape[-2]
    if H == 0 or H % HK:
        raise ValueError(f"v: expected a number of heads that is a multiple of the {HK} of q and k, got {H}")
    check_same("v", v, "q", q, dtype=True)
    per_head, per_channel = (*tokens, H), (*tokens, H, K)
    meaning = f"one for each value head; or {per_channel}, one for each of its channels"
    check_parameter("g", g, per_channel if tuple(g.shape) == per_channel else per_head, meaning, "q", q)
    check_parameter("beta", beta, per_head, "one for each value head", "q", q)
    if call.scale is not None:
        check_finite("scale", call.scale)
    if call.initial_state is not None:
        check_dtype(state, call.initial_state, (torch.float32,))
        check_shape(state, call.initial_state, (tokens[0], H, K, V), "[B, H, K, V]")
        check_same(state, call.initial_state, "q", q)
    if call.sequence_ids is not None:
        check_dtype("sequence_ids", call.sequence_ids, (torch.int32, torch.int64))
        check_shape("sequence_ids", call.sequence_ids, tuple(tokens), "one for each token")
        check_same("sequence_ids", call.sequence_ids, "q", q)


def recurrence_cost(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **options: object) -> Cost:
    """The least to read and write, and the products.

    Forward is two multiplications of a state's size a token and value head, three with a correction; backward has twice
    as many.
    """
    tokens, state, products = v.numel() // v.shape[-1], q.shape[-1] * v.shape[-1], 2 if beta is None else 3
    inputs = sum(x.numel() * x.element_size() for x in (q, k, v, g, beta) if x is not None)
    output = v.numel() * v.element_size()
    flops = 2 * products * tokens * state
    return Cost(inputs + output, 3 * inputs + 2 * output, flops, 3 * flops)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[tuple[Tensor, ...], Tensor, dict, str]]:
    """Calls: q, k, v and g; beta; the keywords that all operators have; why. The last has keys of norm 0."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    floats = partial(torch.rand, device=device, dtype=torch.float32)

    def of(
        B: int, T: int, HK: int, H: int, K: int, V: int, decay: float = 0.2, per_channel: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        q, k = randn(B, T, HK, K), randn(B, T, HK, K) / K**0.5
        g = -decay * floats(B, T, H, *((K,) if per_channel else ()))
        return (q, k, randn(B, T, H, V), g), floats(B, T, H).to(dtype)

    def state(B: int, H: int, K: int, V: int) -> Tensor:
        return torch.randn(B, H, K, V, device=device, dtype=torch.float32)

    def ids(B: int, T: int, *begins: int) -> Tensor:
        marks = torch.zeros(T, device=device, dtype=torch.int64)
        marks[list(begins)] = 1
        return marks.cumsum(0).expand(B, T).contiguous()

    yield *of(2, 16, 1, 1, 16, 16), {}, "powers of two"
    yield *of(1, 70, 1, 2, 12, 9), {"initial_state": state(1, 2, 12, 9)}, "two chunks, odd sizes, an initial state"
    yield *of(1, 130, 1, 1, 8, 8), {"sequence_ids": ids(1, 130, 3, 50, 64, 100)}, "packed sequences"
    packed = {"sequence_ids": ids(2, 7, 4), "initial_state": state(2, 4, 8, 8), "scale": 0.5}
    yield *of(2, 7, 2, 4, 8, 8), packed, "packed sequences, an initial state, a scale"
    yield *of(2, 1, 1, 2, 8, 16), {"initial_state": state(2, 2, 8, 16)}, "one token"
    yield *of(2, 0, 1, 2, 8, 8), {"initial_state": state(2, 2, 8, 8)}, "no tokens"
    yield *of(1, 5, 1, 1, 8, 512), {}, "as many values as there may be"
    yield *of(1, 20, 1, 1, 8, 8, decay=69.0), {}, "decays down to 1e-30"
    (q, k, v, g), beta = of(2, 5, 2, 2, 8, 8)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g))
    initial = torch.linspace(-1, 1, 256, device=device, dtype=torch.float32).view(2, 2, 8, 8).mT
    yield strided, beta, {"initial_state": initial}, "heads before tokens, a state strided"
    for args, options, why in (
        ((1, 70, 1, 2, 12, 9), {"initial_state": state(1, 2, 12, 9)}, "two chunks, odd sizes, an initial state"),
        ((1, 130, 1, 1, 8, 8), {"sequence_ids": ids(1, 130, 3, 50, 64, 100)}, "packed sequences"),
        ((2, 1, 1, 2, 8, 16), {"initial_state": state(2, 2, 8, 16)}, "one token"),
        ((2, 0, 1, 2, 8, 8), {"initial_state": state(2, 2, 8, 8)}, "no tokens"),
        ((1, 66, 1, 1, 8, 20), {}, "more values than keys"),
    ):
        yield *of(*args, per_channel=True), options, f"a decay for each channel, {why}"
    (q, k, v, g), beta = of(1, 20, 1, 2, 8, 8, decay=69.0, per_channel=True)
    # No product of decays is a denormal number, which Triton's interpreter makes another one of bfloat16.
    g = torch.where(g < -35, -69.0, g / 69)
    k[:, ::2], g[..., :4] = 0, 0
    yield (q, k, v, g), beta.round(), {}, "decays of channels of 1 and 1e-30, keys of norm 0, beta 0 or 1"
    (q, k, v, g), beta = of(1, 6, 1, 2, 8, 8)
    k[:, ::2], g[:, 3:] = 0, 0
    yield (q, k, v, g), beta.round(), {}, "keys of norm 0, no decay, beta 0 or 1"
