"""Masks of attention in plain PyTorch, as functions of the number of tokens."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[int], Tensor]
"""Makes a mask of N queries by as many keys."""


def positions(n: int) -> tuple[Tensor, Tensor]:
    """Positions of queries, [N, 1], and of keys, [1, N]."""
    return torch.arange(n).view(n, 1), torch.arange(n)[None, :]


def packed(n: int) -> Tensor:
    """Make the mask by which transformers tells packed sequences apart, of positions that begin once."""
    places = torch.arange(n).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, (q, k) = torch.arange(2)[:, None, None, None], positions(n)
    alike = sequence[row, q[None, None]] == sequence[row, k[None, None]]
    return (q.new_ones((), dtype=torch.bool) & alike & (k <= q)).expand(2, -1, n, n)


def steps(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool).cumsum(0) - 1


CAUSAL: dict[str, Mask] = {
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "cast tril": lambda n: torch.tril(torch.ones(n, n)).bool().view(1, 1, n, n),
    "not triu": lambda n: ~torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1),
    "compared": lambda n: positions(n)[1] <= positions(n)[0],
    "difference": lambda n: positions(n)[0] - positions(n)[1] > -1,
    "transposed": lambda n: (positions(n)[0] <= positions(n)[1]).transpose(-1, -2),
    "counted": lambda n: steps(n)[:, None] >= steps(n),
    "neither later": lambda n: ~((positions(n)[1] > positions(n)[0]) | (positions(n)[1] >= n)),
    "packed": packed,
    "wide window": lambda n: (positions(n)[1] > positions(n)[0] - 8) & (positions(n)[1] <= positions(n)[0]),
    "infinite triu": lambda n: torch.full((n, n), -math.inf).triu(1),
    "where": lambda n: torch.where(CAUSAL["compared"](n), 0.0, LOWEST),
    "filled": lambda n: torch.zeros(n, n).masked_fill(CAUSAL["tril"](n).logical_not(), -math.inf),
    "filled where 0": lambda n: torch.zeros(n, n).masked_fill(torch.ones(n, n).tril() == 0, -math.inf),
    "filled twice": lambda n: CAUSAL["infinite triu"](n).masked_fill(
        positions(n)[1] >= n, -math.inf
    ),  # nothing is past the end
    "times the lowest": lambda n: (1.0 - torch.ones(n, n).tril()) * LOWEST,
}
"""Masks that hide what comes after a token and nothing else."""

OTHERS: dict[str, Mask] = {
    "strict": lambda n: (positions(n)[1] < positions(n)[0]) | (positions(n)[0] == 0),
    "one token ahead": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "the past": lambda n: torch.ones(n, n, dtype=torch.bool).triu(),
    "narrow window": lambda n: CAUSAL["compared"](n) & (positions(n)[1] > positions(n)[0] - 3),
    "steps of two": lambda n: positions(n)[1] <= 2 * positions(n)[0],
    "soft": lambda n: torch.where(CAUSAL["compared"](n), 0.0, -10.0),
    "raised": lambda n: torch.where(CAUSAL["compared"](n), 1.0, -math.inf),
    "one sequence each": lambda n: CAUSAL["compared"](n) & (positions(n)[1] // 3 == positions(n)[0] // 3),
}
