"""The decays of chunks in plain PyTorch: one for each head, or one for each channel of the keys.

The package's docstring has the formulas; names are theirs. Every decay is the exponential of a sum of log decays, never
of a difference of two sums, so that none cancels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""Multiplies matrices."""


@dataclass(frozen=True)
class Decays:
    """The decays from a chunk's start to each token, d, and from each to its end, e `[..., C, 1 or K]`; and d of the
    last token `[..., 1 or K, 1]`. `same` says which pairs of tokens are in one sequence `[..., C, C]`; None where all
    are.
    """

    start: Tensor
    end: Tensor
    whole: Tensor
    same: Tensor | None

    def in_one_sequence(self, pairs: Tensor) -> Tensor:
        """Matrices of pairs of tokens, 0 where the two are in different sequences, and so is the gradient."""
        return pairs if self.same is None else torch.where(self.same, pairs, 0.0)

    def pairs(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        """The sums over the channels of x_t D_tj y_j, on the diagonal and below `[..., C, C]`."""
        raise NotImplementedError

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        """The rows of x times a state that has decayed for each."""
        raise NotImplementedError

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        """The sum of the outer products of k and u, which decay after each."""
        raise NotImplementedError


def decays(g: Tensor, index: Tensor | None) -> Decays:
    """Make them from log decays `[B, H, N, C]` or `[B, H, N, C, K]` and the tokens' sequence indices `[B, 1, N, C]`."""
    per_channel = g.dim() == 5
    g = g if per_channel else g.unsqueeze(-1)
    start, end, whole, same = g.cumsum(-2).exp(), after(g).exp(), g.sum(-2).exp().unsqueeze(-1), None
    if index is not None:
        last = index[..., -1]
        previous = torch.nn.functional.pad(last, (1, 0))[..., :-1]  # of the token before the chunk; 0 for the first
        start = torch.where((index == previous.unsqueeze(-1)).unsqueeze(-1), start, 0.0)
        end = torch.where((index == last.unsqueeze(-1)).unsqueeze(-1), end, 0.0)
        whole = torch.where((last == previous)[..., None, None], whole, 0.0)
        same = index.unsqueeze(-1) == index.unsqueeze(-2)
    if per_channel:
        return ChannelDecays(start, end, whole, same, g)
    later = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1)  # [..., s, j]: g_s where s > j
    between = later.cumsum(-2).exp().tril()
    return HeadDecays(start, end, whole, same, between if same is None else torch.where(same, between, 0.0))


def after(x: Tensor) -> Tensor:
    """Each token's sum of later tokens' `[..., C, K]`."""
    from_last = x[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return torch.nn.functional.pad(from_last, (0, 0, 0, 1))


def decayed(x: Tensor, decays: Tensor) -> Tensor:
    """x times decays; where one is 0, as between two sequences, it does not matter what x and the gradient are."""
    return torch.where(decays == 0, 0.0, x * decays)


@dataclass(frozen=True)
class HeadDecays(Decays):
    """All channels of a head decay alike, so that a product's results are multiplied, those of pairs by D."""

    between: Tensor

    def pairs(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        return decayed(product(x, y.mT), self.between)

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        return decays * product(x, state)

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        return product(k.mT, decays * u)


@dataclass(frozen=True)
class ChannelDecays(Decays):
    """Each channel decays by itself, so that a product's operands are multiplied, those of pairs by halves: of each
    block of 2 s tokens one half decays from its middle and the other to it.
    """

    g: Tensor

    def _halves(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """s, and the decays of the first and the second halves of all blocks of 2 s tokens `[..., C / 2 s, s, K]`."""
        for size in (1 << level for level in range(self.g.shape[-2].bit_length() - 1)):
            first, second = _cut(self.g, size)
            yield size, after(first).exp(), second.cumsum(-2).exp()

    def pairs(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        blocks = product(x.unsqueeze(-2), y.unsqueeze(-1))  # [..., C, 1, 1], the diagonal
        for size, to_middle, from_middle in self._halves():
            (_, later), (earlier, _) = _cut(x, size), _cut(y, size)
            corner = product(later * from_middle, (earlier * to_middle).mT)
            first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat([first, torch.zeros_like(corner)], -1)
            blocks = torch.cat([above, torch.cat([corner, second], -1)], -2)
        return self.in_one_sequence(blocks.squeeze(-3))

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        return product(decayed(x, decays), state)

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        return product(decayed(k, decays).mT, u)


def _cut(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The halves of all blocks of 2 * size tokens `[..., C / (2 * size), size, K]`."""
    first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return first, second
