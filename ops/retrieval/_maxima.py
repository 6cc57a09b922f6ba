r"""The largest product of each row with the tokens of each sequence, the token that has it, and back.

With rows r_t, tokens x_s, and S_n the tokens of sequence n that count:

    best[n, t] = max over s in S_n of r_t . x_s        winner[n, t] = the least such s that has it, -1 for none

`best` is -inf over no tokens. A maximum that is NaN or -inf has no winner, and so no gradient. Given the gradient c of
`best`, each sum over the pairs that have a winner:

    dr_t = sum over n of c[n, t] * x_winner[n, t]
    dx_s = sum over n and t with winner[n, t] = s of c[n, t] * r_t

A program of the forward pass has a block of rows and walks over the tokens of a sequence. It keeps a maximum of each
row for each column of its tile, and compares these once, at the end. The products are never in memory, `best` and the
winners are: 8 bytes for each row and sequence, of which the winners, 4, are kept for the backward pass. That is what
2 tokens of a sequence would take in bfloat16, and to find them again takes the forward pass's product.

In float32, which Triton multiplies without tensor cores, the products are PyTorch's, of some rows with all tokens at a
time, 64 MiB; the program reads them. Where each sequence of rows has sequences of its own the kernel multiplies too.

The backward pass needs no product. Rows gather the tokens that won. For tokens the pairs are sorted by winner, stably,
and each token adds up its own in that order: no atomics, and the same inputs give the same bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.groups import checked_groups, groups_of, in_range
from llmk.ops.common.products import product_tile
from llmk.registry import cdiv, check_dtype, check_same, check_shape, empty, jit, next_power_of_2, wrap_triton
from llmk.registry.devices import INTERPRET

NO_TOKEN = tl.constexpr(2**31 - 1)
AT_ONCE = 2**24
"""The most products that are in memory."""
TILE_OF_PRODUCTS = {
    "WHOLE": False, "EVEN_D": True, "WIDEN": False, "NUM_STAGES": 1, "num_warps": 4,
    "BLOCK_T": 32, "BLOCK_S": 64, "BLOCK_D": 16,
}  # fmt: skip
"""What reads products: it has not been timed."""


@dataclass(frozen=True)
class Sequences:
    """Tokens `[T, D]` of sequences of one `length`, or which end where `ends` says; those that `mask` leaves out do not
    count, and neither do those after the last end."""

    name: str
    tokens: Tensor
    count: int
    length: int = 0
    ends: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, name: str, tokens: Tensor, mask: Tensor | None, offsets: Tensor | None) -> "Sequences":
        if offsets is not None:
            return cls(name, tokens.contiguous(), offsets.shape[0], 0, offsets)
        flat, (count, length, D) = None if mask is None else mask.reshape(-1).contiguous(), tokens.shape
        return cls(name, tokens.reshape(-1, D).contiguous(), count, length, None, flat)

    @cached_property
    def ends_in_range(self) -> Tensor | None:
        """Ends that a kernel may follow, on a device that the host does not wait for."""
        return None if self.ends is None else in_range(self.ends, self.tokens.shape[0])

    def spans(self) -> list[tuple[int, int]]:
        """First token and end of each sequence, on a CPU."""
        if self.ends is not None:
            return checked_groups(option_of(self.name, "offsets"), self.ends, self.tokens.shape[0])
        return [(n * self.length, (n + 1) * self.length) for n in range(self.count)]


def option_of(name: str, option: str) -> str:
    """The name of an option of tokens: one sort alone needs no prefix."""
    return option if name == "input" else f"{name}_{option}"


def check_sequences(name: str, tokens: Tensor, mask: Tensor | None, offsets: Tensor | None) -> None:
    """Tokens `[N, L, D]`, with a mask or none, or `[T, D]` with offsets."""
    check_dtype(name, tokens)
    name_of_mask, name_of_offsets = (option_of(name, option) for option in ("mask", "offsets"))
    layout, dims = ("[N, L, D]", 3) if offsets is None else (f"[T, D] with {name_of_offsets}", 2)
    if tokens.dim() != dims or tokens.shape[-1] == 0 or math.prod(tokens.shape[:-1]) >= NO_TOKEN.value:
        raise ValueError(f"{name}: expected shape {layout}, D at least 1, got {tuple(tokens.shape)}")
    if offsets is not None:
        check_dtype(name_of_offsets, offsets, (torch.int32,))
        check_same(name_of_offsets, offsets, name, tokens)
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            raise ValueError(f"{name_of_offsets}: expected shape [N], N at least 1, got {tuple(offsets.shape)}")
    if mask is not None:
        if offsets is not None:
            raise ValueError(f"{name_of_mask}: expected None with {name_of_offsets}, got a tensor")
        check_dtype(name_of_mask, mask, (torch.bool,))
        check_shape(name_of_mask, mask, tokens.shape[:2], f"the tokens of {name}")
        check_same(name_of_mask, mask, name, tokens)


def count_of(tokens: Tensor, offsets: Tensor | None) -> int:
    """The number of sequences."""
    return tokens.shape[0] if offsets is None else offsets.shape[0]


def padded(tokens: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[N, L, D]` and which of them are tokens `[N, L]`, for references."""
    if offsets is None:
        return tokens, tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask
    groups = groups_of(offsets)
    longest = max(1, *(end - begin for begin, end in groups))
    rows = [torch.nn.functional.pad(tokens[a:b], (0, 0, 0, longest - b + a)) for a, b in groups]
    live = [torch.arange(longest, dtype=torch.int64, device=tokens.device) < b - a for a, b in groups]
    return torch.stack(rows), torch.stack(live)


@jit
def _span(ends_ptr, index, length, live):
    """First token and end of a sequence; after the last one, which is not live, no tokens."""
    if ends_ptr is None:
        begin = (index * length).to(tl.int64)
        end = begin + tl.where(live, length, 0)
    else:
        begin = tl.load(ends_ptr + index - 1, mask=index > 0, other=0).to(tl.int64)
        end = tl.load(ends_ptr + index, mask=live, other=0).to(tl.int64)
    return begin, end


@jit
def maxima_kernel(
    rows_ptr, row_mask_ptr, row_ends_ptr, tokens_ptr, token_mask_ptr, token_ends_ptr, products_ptr, best_ptr,
    winner_ptr, T, Q, row_length, N, token_length, D, products_stride, best_stride,
    PAIRWISE: tl.constexpr, WHOLE: tl.constexpr, EVEN_D: tl.constexpr, WIDEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    begin, end = _span(token_ends_ptr, tl.minimum(sequence, N), token_length, sequence < N)
    first_row, last_row, place = tl.zeros((), dtype=tl.int64), tl.cast(T, tl.int64), sequence.to(tl.int64)
    if PAIRWISE:  # the sequences after the last are none, for rows after the last query
        query = sequence // (N // Q)
        place = (sequence % (N // Q)).to(tl.int64)
        first_row, end_row = _span(row_ends_ptr, query, row_length, query < Q)
        last_row = tl.where(query < Q, end_row, last_row)
    ds, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    for start_row in range(first_row + tl.program_id(1) * BLOCK_T, last_row, tl.num_programs(1) * BLOCK_T):
        rows = start_row + tl.arange(0, BLOCK_T)
        if WHOLE:
            row_mask = (rows < last_row)[:, None] & (ds < D)[None, :]
            r = tl.load(rows_ptr + (rows * D)[:, None] + ds[None, :], mask=row_mask, other=0.0)
            if WIDEN:
                r = r.to(tl.float32)
        best = tl.full((BLOCK_T, BLOCK_S), -float("inf"), dtype=tl.float32)
        origin = tl.full((BLOCK_T, BLOCK_S), -1, dtype=tl.int32)
        for start in tl.range(begin, end, BLOCK_S, num_stages=NUM_STAGES):
            tokens = start + cols
            live = tokens < end
            if products_ptr is not None:
                product_mask = (rows < last_row)[:, None] & live[None, :]
                product_ptrs = products_ptr + (rows * products_stride)[:, None] + tokens[None, :]
                product = tl.load(product_ptrs, mask=product_mask, other=0.0)
            elif WHOLE:
                x_ptrs = tokens_ptr + start * D + (cols[None, :] * D + ds[:, None])
                x = tl.load(x_ptrs, mask=live[None, :] & (ds < D)[:, None], other=0.0)
                if WIDEN:
                    x = x.to(tl.float32)
                product = tl.dot(r, x, input_precision="ieee")
            else:
                product = product_tile(
                    rows_ptr, tokens_ptr, start_row, start, last_row, end, D, D, 1, D, 1,
                    EVEN_D, WIDEN, BLOCK_T, BLOCK_S, BLOCK_D, NUM_STAGES,
                )  # fmt: skip
            if token_mask_ptr is not None:
                live &= tl.load(token_mask_ptr + tokens, mask=live, other=0) != 0
            product = tl.where(live[None, :], product, -float("inf"))
            origin = tl.where(product > best, tl.cast(start, tl.int32), origin)
            best = tl.maximum(best, product, propagate_nan=tl.PropagateNan.ALL)
        is_nan = tl.max((best != best).to(tl.int32), axis=1) > 0
        top = tl.max(best, axis=1)
        candidates = tl.where((best == top[:, None]) & (origin >= 0), origin + cols[None, :], NO_TOKEN)
        winner = tl.min(candidates, axis=1)
        winner = tl.where(is_nan | (winner == NO_TOKEN), -1, winner)
        top = tl.where(is_nan, float("nan"), top)
        if row_mask_ptr is not None:
            counts = tl.load(row_mask_ptr + rows, mask=rows < last_row, other=0) != 0
            top, winner = tl.where(counts, top, 0.0), tl.where(counts, winner, -1)
        tl.store(best_ptr + place * best_stride + rows, top, mask=rows < last_row)
        tl.store(winner_ptr + place * best_stride + rows, winner, mask=rows < last_row)


@jit
def sum_of_rows_kernel(best_ptr, ends_ptr, scores_ptr, R, T, length, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):
    query = tl.program_id(0)
    places = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin, end = _span(ends_ptr, query, length, query >= 0)
    total = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (places < R)[:, None] & (rows < end)[None, :]
        total += tl.load(best_ptr + (places * T)[:, None] + rows[None, :], mask=mask, other=0.0)
    tl.store(scores_ptr + query.to(tl.int64) * R + places, tl.sum(total, axis=1), mask=places < R)


@jit
def sum_of_winners_kernel(
    table_ptr, coef_ptr, winner_ptr, order_ptr, bounds_ptr, out_ptr, R, T, D,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Without an order, row t adds what won it in each sequence; with one, token s the rows that it won."""
    item = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = tl.zeros((), dtype=tl.int64), tl.cast(R, tl.int64)
    if bounds_ptr is not None:
        begin, end = tl.load(bounds_ptr + item), tl.load(bounds_ptr + item + 1)
    total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_P):
        places = start + tl.arange(0, BLOCK_P)
        if order_ptr is None:
            pairs = places * T + item
            source = tl.load(winner_ptr + pairs, mask=places < end, other=-1).to(tl.int64)
        else:
            pairs = tl.load(order_ptr + places, mask=places < end, other=0)
            source = tl.where(places < end, pairs % T, -1)
        coef = tl.load(coef_ptr + pairs, mask=source >= 0, other=0.0)
        mask = (source >= 0)[:, None] & (cols < D)[None, :]
        value = tl.load(table_ptr + (source * D)[:, None] + cols[None, :], mask=mask, other=0.0)
        total += coef[:, None] * value.to(tl.float32)
    tl.store(out_ptr + item * D + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < D)


def _tile(T: int, D: int, element_size: int) -> dict[str, Any]:
    """A row of up to 256 bytes is held whole; longer ones are walked over again for each block of tokens."""
    width = max(16, next_power_of_2(D))
    whole = width * element_size <= 256
    block_d = width if whole else 128 // element_size
    most, warps, stages = (128, 8, 3) if element_size == 2 else (64, 4, 2)
    return {
        "WHOLE": whole, "EVEN_D": D % block_d == 0, "WIDEN": INTERPRET, "NUM_STAGES": stages, "num_warps": warps,
        "BLOCK_T": min(most, max(16, next_power_of_2(T))), "BLOCK_S": 64, "BLOCK_D": block_d,
    }  # fmt: skip


def _maxima(rows: Sequences, sequences: Sequences, *, pairwise: bool = False) -> tuple[Tensor, Tensor]:
    """`best` float32 and winners int32 `[N, T]` of T rows and N sequences.

    Where `pairwise`, each of the Q sequences of rows has N / Q sequences of its own, one after the other, and both are
    `[N / Q, T]`. Rows after the last have no winner.
    """
    (T, D), N, device = rows.tokens.shape, sequences.count, rows.tokens.device
    R = N // rows.count if pairwise else N
    best, winners = empty((R, T), torch.float32, device), empty((R, T), torch.int32, device)
    of_sequences = sequences.tokens, sequences.mask, sequences.ends_in_range
    sizes = rows.length, N, sequences.length, D
    if rows.tokens.dtype != torch.float32 or pairwise:
        tile = _tile(rows.length or 64 if pairwise else T, D, rows.tokens.element_size())
        blocks = cdiv(rows.length or 1 if pairwise else T, tile["BLOCK_T"])
        wrap_triton(maxima_kernel)[(N + R if pairwise else N, blocks)](
            rows.tokens, rows.mask, rows.ends_in_range, *of_sequences, None, best, winners, T, rows.count, *sizes, 0, T,
            PAIRWISE=pairwise, **tile,
        )  # fmt: skip
        return best, winners
    S = sequences.tokens.shape[0]
    step = max(1, AT_ONCE // max(S, 1))
    for first in range(0, T, step):
        some = slice(first, first + step)
        products = rows.tokens[some] @ sequences.tokens.t()
        mask, M = None if rows.mask is None else rows.mask[some], products.shape[0]
        wrap_triton(maxima_kernel)[(N, cdiv(M, TILE_OF_PRODUCTS["BLOCK_T"]))](
            rows.tokens, mask, None, *of_sequences, products, best[:, some], winners[:, some], M, 1, *sizes, S, T,
            PAIRWISE=False, **TILE_OF_PRODUCTS,
        )  # fmt: skip
    return best, winners


def _sum_of_rows(best: Tensor, rows: Sequences) -> Tensor:
    """`[Q, R]`: the sums of `best [R, T]` over the rows of each of Q sequences of them."""
    R, T = best.shape
    scores = empty((rows.count, R), torch.float32, best.device)
    wrap_triton(sum_of_rows_kernel)[(rows.count, cdiv(R, 32))](
        best, rows.ends_in_range, scores, R, T, rows.length, BLOCK_R=32, BLOCK_T=32, num_warps=4
    )
    return scores


def _rows_gradient(coef: Tensor, winners: Tensor, tokens: Tensor) -> Tensor:
    """`[T, D]` in the dtype of `tokens [S, D]`, from the gradient of `best [R, T]`."""
    return _sum_of_winners(coef, winners, tokens, winners.shape[1])


def _tokens_gradient(coef: Tensor, winners: Tensor, rows: Tensor, S: int) -> Tensor:
    """`[S, D]` in the dtype of `rows [T, D]`, from the gradient of `best [R, T]`."""
    ordered, order = torch.sort(winners.reshape(-1), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(S + 1, dtype=torch.int32, device=rows.device))
    return _sum_of_winners(coef, winners, rows, S, order, bounds)


def _sum_of_winners(
    coef: Tensor, winners: Tensor, table: Tensor, items: int, order: Tensor | None = None, bounds: Tensor | None = None
) -> Tensor:
    (R, T), D = winners.shape, table.shape[1]
    out = empty((items, D), table.dtype, table.device)
    block = {"BLOCK_P": 32, "BLOCK_D": min(128, next_power_of_2(D)), "num_warps": 4}
    wrap_triton(sum_of_winners_kernel)[(items, cdiv(D, block["BLOCK_D"]))](
        table, coef, winners, order, bounds, out, R, T, D, **block
    )
    return out


def _maxima_cpu(rows: Sequences, sequences: Sequences, *, pairwise: bool = False) -> tuple[Tensor, Tensor]:
    """`_maxima` in plain PyTorch: the products of one sequence are in memory at a time."""
    T, R = rows.tokens.shape[0], sequences.count // rows.count if pairwise else sequences.count
    best = torch.full((R, T), float("-inf"), dtype=torch.float32, device=rows.tokens.device)
    winners = torch.full((R, T), -1, dtype=torch.int32, device=rows.tokens.device)
    queries = rows.spans() if pairwise else [(0, T)]
    for n, (begin, end) in enumerate(sequences.spans()):
        positions = torch.arange(begin, end, dtype=torch.int32, device=best.device)
        if sequences.mask is not None:
            positions = positions[sequences.mask[begin:end]]
        place, (first, last) = (n % R, queries[n // R]) if pairwise else (n, queries[0])
        if positions.numel() and last > first:
            product = rows.tokens[first:last].float() @ sequences.tokens[positions].float().t()
            top, at = product.amax(1), product.argmax(1)
            best[place, first:last] = top
            winners[place, first:last] = positions[at].masked_fill(~(top > float("-inf")), -1)
    if rows.mask is not None:
        best, winners = best.masked_fill(~rows.mask, 0), winners.masked_fill(~rows.mask, -1)
    return best, winners


def _sum_of_rows_cpu(best: Tensor, rows: Sequences) -> Tensor:
    sums: Sequence[Tensor] = [best[:, begin:end].sum(1) for begin, end in rows.spans()]
    return torch.stack([*sums, best.new_empty(best.shape[0])])[:-1].contiguous()


def _rows_gradient_cpu(coef: Tensor, winners: Tensor, tokens: Tensor) -> Tensor:
    total = torch.zeros((winners.shape[1], tokens.shape[1]), dtype=torch.float32, device=tokens.device)
    for of_rows, won_by in zip(coef, winners, strict=True):
        won = (won_by >= 0).nonzero()[:, 0]
        total.index_add_(0, won, of_rows[won, None] * tokens[won_by[won]].float())
    return total.to(tokens.dtype)


def _tokens_gradient_cpu(coef: Tensor, winners: Tensor, rows: Tensor, S: int) -> Tensor:
    total = torch.zeros((S, rows.shape[1]), dtype=torch.float32, device=rows.device)
    for of_rows, won_by in zip(coef, winners, strict=True):
        won = (won_by >= 0).nonzero()[:, 0]
        total.index_add_(0, won_by[won], of_rows[won, None] * rows[won].float())
    return total.to(rows.dtype)


class Implementation(NamedTuple):
    """What computes: the launches of kernels, or plain PyTorch on a CPU."""

    maxima: Callable[..., tuple[Tensor, Tensor]]
    sum_of_rows: Callable[[Tensor, Sequences], Tensor]
    rows_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    tokens_gradient: Callable[[Tensor, Tensor, Tensor, int], Tensor]


KERNELS = Implementation(_maxima, _sum_of_rows, _rows_gradient, _tokens_gradient)
PYTORCH = Implementation(_maxima_cpu, _sum_of_rows_cpu, _rows_gradient_cpu, _tokens_gradient_cpu)
