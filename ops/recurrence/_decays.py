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
    last token `[..., 1 or K, 1]`.
    """

    start: Tensor
    end: Tensor
    whole: Tensor

    def pairs(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        """The sums over the channels of x_t D_tj y_j, on the diagonal and below `[..., C, C]`."""
        raise NotImplementedError

    def pairs_gradients(self, grad: Tensor, x: Tensor, y: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, y and g through `pairs`."""
        raise NotImplementedError

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        """The rows of x times a state that has decayed for each."""
        raise NotImplementedError

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        """The sum of the outer products of k and u, which decay after each."""
        raise NotImplementedError

    def of_g(self, x: Tensor) -> Tensor:
        """Each channel's part `[..., K]` of the gradient of a log decay."""
        raise NotImplementedError

    def ends_gradient(self, start: Tensor, end: Tensor, whole: Tensor) -> Tensor:
        """dg from the gradients of log d, log e and log d_C: each log decay is in the sums over spans that it is in."""
        return from_last(self.of_g(start)) + before(self.of_g(end)) + self.of_g(whole).unsqueeze(-2)


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
        return ChannelDecays(start, end, whole, g, same)
    later = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1)  # [..., s, j]: g_s where s > j
    between = later.cumsum(-2).exp().tril()
    return HeadDecays(start, end, whole, between if same is None else torch.where(same, between, 0.0))


def from_last(x: Tensor) -> Tensor:
    """Each token's sum of its own and later tokens' `[..., C, K]`."""
    return x.flip(-2).cumsum(-2).flip(-2)


def after(x: Tensor) -> Tensor:
    """Each token's sum of later tokens' `[..., C, K]`."""
    return torch.nn.functional.pad(from_last(x[..., 1:, :]), (0, 0, 0, 1))


def before(x: Tensor) -> Tensor:
    """Each token's sum of earlier tokens' `[..., C, K]`."""
    return torch.nn.functional.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def decayed(x: Tensor, decays: Tensor) -> Tensor:
    """x times decays; where one is 0, as between two sequences, it does not matter what x is."""
    return torch.where(decays == 0, 0.0, x * decays)


@dataclass(frozen=True)
class HeadDecays(Decays):
    """All channels of a head decay alike, so that a product's results are multiplied, those of pairs by D."""

    between: Tensor

    def pairs(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        return decayed(product(x, y.mT), self.between)

    def pairs_gradients(self, grad: Tensor, x: Tensor, y: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        through = decayed(grad, self.between)
        until = decayed(grad, pairs).tril(-1).cumsum(-1)  # [..., t, s]: of all j <= s
        spans = until.tril(-1).sum(-2)[..., :-1]  # those with j <= s < t
        return through @ y, through.mT @ x, torch.nn.functional.pad(spans, (1, 0)).unsqueeze(-1)

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        return decays * product(x, state)

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        return product(k.mT, decays * u)

    def of_g(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)


@dataclass(frozen=True)
class ChannelDecays(Decays):
    """Each channel decays by itself, so that a product's operands are multiplied, those of pairs by halves: of each
    block of 2 s tokens one half decays from its middle and the other to it. `same` says which pairs of tokens are in
    one sequence `[..., C, C]`; None where all are.
    """

    g: Tensor
    same: Tensor | None

    def _in_one_sequence(self, pairs: Tensor) -> Tensor:
        return pairs if self.same is None else torch.where(self.same, pairs, 0.0)

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
        return self._in_one_sequence(blocks.squeeze(-3))

    def pairs_gradients(self, grad: Tensor, x: Tensor, y: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = self._in_one_sequence(grad).unsqueeze(-3)
        diagonal = grad.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dx, dy, dg = diagonal * y, diagonal * x, torch.zeros_like(x)
        for size, to_middle, from_middle in reversed(list(self._halves())):
            (_, later), (earlier, _) = _cut(x, size), _cut(y, size)
            corner = blocks[..., size:, :size]
            dlater = from_middle * (corner @ (earlier * to_middle))
            dearlier = to_middle * (corner.mT @ (later * from_middle))
            dx = dx + _joined(torch.zeros_like(dlater), dlater)
            dy = dy + _joined(dearlier, torch.zeros_like(dearlier))
            dg = dg + _joined(before(earlier * dearlier), from_last(later * dlater))
            blocks = torch.stack([blocks[..., :size, :size], blocks[..., size:, size:]], -3).flatten(-4, -3)
        return dx, dy, dg

    def from_state(self, product: Product, x: Tensor, decays: Tensor, state: Tensor) -> Tensor:
        return product(decays * x, state)

    def into_state(self, product: Product, k: Tensor, decays: Tensor, u: Tensor) -> Tensor:
        return product((decays * k).mT, u)

    def of_g(self, x: Tensor) -> Tensor:
        return x


def _cut(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The halves of all blocks of 2 * size tokens `[..., C / (2 * size), size, K]`."""
    first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return first, second


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Undo `_cut`."""
    return torch.stack([first, second], -3).flatten(-4, -2)
