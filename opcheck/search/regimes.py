"""Values for the search: regimes in which formulas go wrong, drawn row by row.

Every regime is a function of the shape, of a generator and of what the samples say about the argument (`Domain`), and
gives float64 numbers, which are then rounded to the argument's dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from llmk.registry.devices import INTERPRET


@dataclass(frozen=True)
class Domain:
    """The common properties of all samples of a floating argument."""

    lowest: float = -math.inf
    highest: float = math.inf
    sums_to_one: bool = False
    log_sums_to_zero: bool = False
    has_infinity: bool = False
    scale: float = 1.0
    specials: tuple[float, ...] = ()

    def holds(self, values: Tensor) -> Tensor:
        """The values, moved to where the samples are: of their sign, or rows that are probabilities."""
        if self.log_sums_to_zero:
            return values.log_softmax(-1)
        if self.sums_to_one:
            return values.softmax(-1)
        if self.lowest >= 0:
            values = values.abs()
        elif self.highest <= 0:
            values = -values.abs()
        return values

    def part_of(self, numbers: Sequence[float]) -> list[float]:
        """The numbers that are where the samples are, one by one."""
        highest = 1.0 if self.sums_to_one else self.highest
        return [number for number in numbers if self.lowest <= number <= highest]


def domain_of(tensors: list[Tensor], specials: tuple[float, ...]) -> Domain:
    """The domain that some samples of one argument show; a sign or a sum only if enough numbers have it."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    finite = flat[flat.isfinite()]
    if finite.numel() < 4:
        return Domain(specials=specials)
    rows = [tensor.detach().double() for tensor in tensors if tensor.dim() and tensor.shape[-1] > 1 and tensor.numel()]
    low, high = float(finite.min()), float(finite.max())

    def close(sums: list[Tensor], right: float) -> bool:
        return bool(sums) and all(bool((total - right).abs().max() < 0.05) for total in sums)

    return Domain(
        lowest=0.0 if low >= 0 else -math.inf,
        highest=0.0 if high <= 0 else math.inf,
        sums_to_one=low >= 0 and close([row.sum(-1) for row in rows], 1.0),
        log_sums_to_zero=high <= 0 and close([row.logsumexp(-1) for row in rows], 0.0),
        has_infinity=bool(flat.isinf().any()),
        scale=float(finite.square().mean().sqrt()) or 1.0,
        specials=specials,
    )


@dataclass
class Draw:
    """A generator for tensors, one for choices, the dtype that is aimed at, and the argument's domain."""

    tensors: torch.Generator
    choices: Random
    dtype: torch.dtype
    domain: Domain

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.tensors, dtype=torch.float64, device="cpu")

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.tensors, dtype=torch.float64, device="cpu")

    def whole(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=self.tensors, dtype=torch.int64, device="cpu")

    def signs(self, shape: tuple[int, ...]) -> Tensor:
        return 2.0 * self.whole(2, shape).double() - 1

    def exponents(self, shape: tuple[int, ...]) -> Tensor:
        """Powers of two, log-uniform over a part of the dtype's range."""
        info = torch.finfo(self.dtype)
        least, most = math.frexp(info.tiny)[1], math.frexp(info.max)[1] - 1
        low = self.choices.choice((least, least // 2, -24, -10, -3, 0))
        high = self.choices.choice((0, 3, 7, 10, most // 2, most))
        low, high = max(low, least), min(high, most)
        return torch.exp2(low + (high - low) * self.uniform(shape))

    def height(self) -> float:
        """A gap or a size: from 0 to past float32's exponent, where exp, its square or its root is 0 or infinite."""
        return self.choices.choice((1.0, 17.0, 30.0, 46.0, 60.0, 88.0, 89.0, 104.0, 150.0, 200.0))


Regime = Callable[[Draw, tuple[int, ...]], Tensor]


def elements_log_uniform(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.signs(shape) * draw.exponents(shape)


def rows_log_uniform(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.normal(shape) * draw.exponents((*shape[:-1], 1))


def scaled(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.normal(shape) * draw.height()


def gap(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """The largest entry of a row stands out, or the largest two do and differ by less."""
    values = draw.normal(shape) * draw.choices.choice((0.0, 0.1, 1.0))
    if shape[-1]:
        height = draw.height() * draw.choices.random()
        place = draw.whole(shape[-1], (*shape[:-1], 1))
        values.scatter_(-1, place, values.max(-1, keepdim=True).values + height)
        if draw.choices.random() < 0.5:
            next_place = (place + 1) % shape[-1]
            values.scatter_(-1, next_place, values.gather(-1, place) - draw.height() * draw.choices.random())
    return values


def ties(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Few different numbers, each exact in every dtype."""
    count = draw.choices.choice((2, 3, 5))
    return (draw.whole(count, shape) - count // 2).double() * draw.choices.choice((0.25, 0.5, 1.0, 2.0))


def neighbours(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Ties of which some moved by a unit in the last place."""
    values = ties(draw, shape).to(draw.dtype)
    moved = torch.nextafter(values, draw.signs(shape).to(draw.dtype) * math.inf)
    return torch.where(draw.uniform(shape) < 0.3, moved, values).double()


def at_specials(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Draw the numbers that options and formulas decide by, and those next to them."""
    known = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, *draw.domain.specials], dtype=torch.float64, device="cpu")
    values = known[draw.whole(len(known), shape)] * draw.choices.choice((1.0, 1.0, -1.0))
    rounded = values.to(draw.dtype)
    moved = torch.nextafter(rounded, draw.signs(shape).to(draw.dtype) * math.inf)
    return torch.where(draw.uniform(shape) < 0.3, moved, rounded).double()


def flat(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Rows that are constant."""
    value = draw.choices.choice((0.0, 1.0, draw.height(), 1e-3, 1000.0))
    rows = draw.normal((*shape[:-1], 1)) if draw.choices.random() < 0.5 else torch.ones((), dtype=torch.float64)
    return (rows * value).expand(shape).clone()


def offset(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Rows whose elements differ by little beside their mean."""
    return draw.normal(shape) * draw.choices.choice((0.01, 1.0)) + draw.signs((*shape[:-1], 1)) * 10 * draw.height()


def saturated(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.signs(shape) * draw.height() * draw.choices.choice((1.0, 1.0, 10.0))


def peaked(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """One entry of a row is all there is."""
    values = torch.zeros(shape, dtype=torch.float64, device="cpu")
    if shape[-1]:
        place = draw.whole(shape[-1], (*shape[:-1], 1))
        values.scatter_(-1, place, draw.signs((*shape[:-1], 1)) * draw.height())
    return values


def outlier(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    values = draw.normal(shape)
    if shape[-1]:
        place = draw.whole(shape[-1], (*shape[:-1], 1))
        values.scatter_(-1, place, elements_log_uniform(draw, (*shape[:-1], 1)))
    return values


def sparse(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Many zeros, and rows of nothing else."""
    kept = draw.uniform(shape) < draw.choices.choice((0.1, 0.5))
    return draw.normal(shape) * kept * (draw.uniform((*shape[:-1], 1)) < 0.7)


def masked(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Some entries are -inf, never a whole row unless it has one entry alone."""
    hidden = draw.uniform(shape) < draw.choices.choice((0.1, 0.5, 0.9))
    if shape[-1]:
        place = draw.whole(shape[-1], (*shape[:-1], 1))
        hidden.scatter_(-1, place, torch.zeros_like(place, dtype=torch.bool))
    return scaled(draw, shape).masked_fill(hidden, -math.inf)


def ordinary(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.normal(shape) * draw.domain.scale


REGIMES: tuple[Regime, ...] = (
    elements_log_uniform,
    rows_log_uniform,
    scaled,
    gap,
    ties,
    neighbours,
    at_specials,
    flat,
    offset,
    saturated,
    peaked,
    outlier,
    sparse,
    ordinary,
)
DECIDING: frozenset[str] = frozenset({"ties", "neighbours", "at_specials", "flat", "sparse", "peaked"})
"""Those that put numbers where an operator decides: its decisions are then held against the reference's."""


def values_of(regime: Regime, draw: Draw, like: Tensor) -> Tensor:
    """A tensor of a regime in another's shape and dtype, rounded, without any infinity that the regime has not."""
    shape = tuple(like.shape) or (1,)
    values = draw.domain.holds(regime(draw, shape)).reshape(like.shape)
    most = torch.finfo(like.dtype).max
    finite = readable(values.clamp(-most, most).to(like.dtype))
    return torch.where(values.isinf(), values.to(like.dtype), finite).to(like.device)


def readable(values: Tensor) -> Tensor:
    """The values, with zeros for what Triton's interpreter cannot read: it makes other numbers of bfloat16 subnormals.

    Its conversions to and from float32 do.
    """
    if not INTERPRET or values.dtype != torch.bfloat16:
        return values
    return torch.where(values.abs() < torch.finfo(values.dtype).tiny, values * 0.0, values)
