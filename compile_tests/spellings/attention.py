"""Attention in plain PyTorch whose mask hides the future, or whose keys are repeated for the heads that share them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.fuzz_program import Input
from compile_tests.spellings.masks import CAUSAL, Mask
from compile_tests.spellings.registry import SPELLINGS, Spelling, named, spelling


def heads(count: int) -> Input:
    """Return heads that are not large.

    Where the softmax is one key's, the gradients of PyTorch's kernel for masks are exactly 0 and those of its others
    what float32 rounds.
    """
    return Input("", (2, count, 6, 8), scale=0.5)


SHARED = heads(2), heads(1), heads(1)


def attention(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = mask(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, seen if seen.dtype == torch.bool else seen.to(q.dtype))


SPELLINGS.update(
    (f"attention, {name}", Spelling("attention", partial(attention, mask), named([heads(2)] * 3)))
    for name, mask in CAUSAL.items()
)


@spelling("attention", *SHARED)
def expanded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(2, 1, 2, 6, 8).reshape(2, 2, 6, 8) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelling("attention", *SHARED)
def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(CAUSAL["tril"], q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
