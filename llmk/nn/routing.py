"""Losses of a router: compositions of PyTorch, of which a compiler makes few kernels, and for which we have none."""

import torch
from torch import Tensor

from llmk.registry import check_dtype, check_floating


def load_balance_loss(logits: Tensor, indices: Tensor) -> Tensor:
    """E times the sum over experts of the share of tokens that got each and of its mean probability.

    It is K where all experts get as much, and larger where few get most. The gradient is that of the probabilities.

    Args:
        logits: The router's `[..., E]`, any floating dtype.
        indices: The experts that were chosen `[..., K]`, of the same tokens, int64 or int32; one that there is not is
            a choice of none.

    Returns:
        A float32 scalar; NaN of no tokens.

    Raises:
        TypeError: `logits` are not floating-point numbers, or `indices` no integers.
        ValueError: The tokens of the two differ.

    Source: the Switch Transformer, https://arxiv.org/abs/2101.03961, (4) to (6), summed over K choices as Mixtral's.
    """
    check_floating("logits", logits)
    check_dtype("indices", indices, (torch.int64, torch.int32))
    if indices.dim() == 0 or indices.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"indices: expected shape ({', '.join(map(str, logits.shape[:-1]))}, K) to fit logits, "
            f"got {tuple(indices.shape)}"
        )
    experts = torch.arange(logits.shape[-1], dtype=indices.dtype, device=indices.device)
    shares = (indices.flatten(0, -2).unsqueeze(-1) == experts).float().mean(0).sum(0)
    probabilities = logits.flatten(0, -2).softmax(-1, dtype=torch.float32).mean(0)
    return logits.shape[-1] * (shares * probabilities).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of the squared logarithm of the softmax's denominator, which keeps logits small.

    Args:
        logits: The router's `[..., E]`, any floating dtype.

    Returns:
        A float32 scalar; NaN of no tokens.

    Raises:
        TypeError: `logits` are not floating-point numbers.

    Source: ST-MoE, https://arxiv.org/abs/2202.08906, (5).
    """
    check_floating("logits", logits)
    return logits.float().logsumexp(-1).square().mean()
