"""Which sequence each token belongs to, in a padded batch or a packed one, and sums over sequences.

A padded batch has a sequence a row. A packed one has a single row and a number for each token, of which no order is
asked. Sums over the sequences of a packed batch are taken over `[sequences, tokens]`, the tokens of others being left
out: no addition depends on the order in which a device comes to it, and NaN in one sequence stays there. Compiled,
nothing of that size is held.

How many sequences a packed batch holds is data, which only the device knows. Where no argument of the caller says it,
there are as many places as tokens, and `exists` says which of them count.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._checks import INTEGERS, check_batch, check_of_tokens


@dataclass(frozen=True)
class Sequences:
    counts: Tensor  # [B, S], whether a token counts
    ids: Tensor | None  # [1, T], of a packed batch
    places: int  # for sequences
    member: Tensor | None  # [places, T], whether a token is of a sequence; of a packed batch
    lengths: Tensor  # [places], how many tokens of each count, float32
    found: Tensor | None  # [], how many there are; None where all places are taken

    @classmethod
    def of_rows(cls, counts: Tensor) -> "Sequences":
        return cls(counts, None, counts.shape[0], None, counts.sum(-1, dtype=torch.float32), None)

    @classmethod
    def of_ids(cls, counts: Tensor, ids: Tensor, count: int | None) -> "Sequences":
        places = counts.shape[1] + counts.shape[1] % 2 if count is None else count
        member = ids == torch.arange(places, device=ids.device, dtype=ids.dtype).unsqueeze(1)
        lengths = (member & counts).sum(-1, dtype=torch.float32)
        found = F.pad(ids, (0, 1), value=-1).amax() + 1 if count is None else None
        return cls(counts, ids, places, member, lengths, found)

    def sum(self, values: Tensor) -> Tensor:
        """Of each sequence, `[places]`, over its tokens; `values [B, S]` are 0 where a token does not count."""
        if self.member is None:
            return values.sum(-1)
        return torch.where(self.member, values, 0.0).sum(-1)

    def averages(self, values: Tensor) -> Tensor:
        """Of each sequence, `[places]`: the mean over its tokens that count, 0 over none."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def spread(self, values: Tensor) -> Tensor:
        """`[places]`, one of each sequence, to its tokens: `[B, S]`."""
        if self.member is None:
            return values.unsqueeze(-1).expand(self.counts.shape)
        return torch.where(self.member, values.unsqueeze(-1), 0.0).sum(0, keepdim=True)

    def positions(self) -> Tensor:
        """`[B, S]`: how many tokens of the own sequence count up to and with this one."""
        if self.member is None:
            return self.counts.cumsum(-1)
        return torch.where(self.member, (self.member & self.counts).cumsum(-1), 0).sum(0, keepdim=True)

    def mean(self, values: Tensor) -> Tensor:
        """Over the sequences, of `[places]`."""
        return mean_of(values, self.exists())

    def number(self) -> Tensor | int:
        """How many there are."""
        exists = self.exists()
        return self.places if exists is None else exists.sum().clamp(min=1)

    def exists(self, in_pairs: bool = False) -> Tensor | None:
        """`[places]`, or of pairs half of them: whether there is such a one; None if all are there."""
        if self.found is None:
            return None
        places, found = (self.places // 2, (self.found + 1) // 2) if in_pairs else (self.places, self.found)
        return torch.arange(places, device=self.counts.device) < found

    def halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """`[places]` of pairs, as chosen and rejected: the halves of a padded batch, even and odd in a packed one."""
        if self.ids is None:
            return values[: self.places // 2], values[self.places // 2 :]
        return values[0::2], values[1::2]

    def checked(self, loss: Tensor) -> Tensor:
        """The loss; NaN where a token that counts is of a sequence for which there is no place."""
        if self.ids is None:
            return loss
        stray = self.counts & ((self.ids < 0) | (self.ids >= self.places))
        return torch.where(stray.any(), float("nan"), loss)


def mean_of(values: Tensor, counts: Tensor | None) -> Tensor:
    """Over those that count, 0 over none; None for all of them."""
    if counts is None:
        return values.mean()
    return torch.where(counts, values, 0.0).sum() / counts.sum().clamp(min=1)


def sequences_of(
    input: Any,
    linear_weight: Any,
    target: Any,
    ignore_index: int,
    sequence_ids: Any,
    count: int | None = None,
    in_pairs: bool = False,
) -> Sequences:
    """Of a batch whose arguments fit each other. `count` is how many an argument says that a packed batch holds."""
    check_batch(input, linear_weight, target)
    B = target.shape[0]
    counts = target.long() != ignore_index  # int32 would wrap an index that it does not hold
    if sequence_ids is None:
        if in_pairs and B % 2:
            raise ValueError(f"input: expected an even number of sequences, chosen and then rejected, got {B}")
        return Sequences.of_rows(counts)
    check_of_tokens("sequence_ids", sequence_ids, target, INTEGERS)
    if B != 1:
        raise ValueError(f"sequence_ids: expected input of shape [1, T, H] with it, got {tuple(input.shape)}")
    if count is not None and in_pairs and count % 2:
        raise ValueError(f"num_sequences: expected an even number, chosen and rejected by turns, got {count}")
    return Sequences.of_ids(counts, sequence_ids, count)


def number_of_sequences(num_sequences: int | None, name: str, of_sequences: Any) -> int | None:
    """What `num_sequences` says, or else the length of an argument that has one number for each sequence."""
    given = of_sequences.shape[0] if isinstance(of_sequences, Tensor) and of_sequences.dim() == 1 else None
    if num_sequences is not None and num_sequences < 0:
        raise ValueError(f"num_sequences: expected None or a number of at least 0, got {num_sequences}")
    if num_sequences is not None and given is not None and given != num_sequences:
        raise ValueError(f"{name}: expected shape ({num_sequences},) (num_sequences), got ({given},)")
    return given if num_sequences is None else num_sequences
