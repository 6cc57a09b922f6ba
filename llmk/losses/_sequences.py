"""Which sequence each token belongs to, in a padded batch or a packed one, and sums over sequences.

A padded batch has a sequence a row. A packed one has a single row and an index for each token, in any order.
Sums over the sequences of a packed batch reduce `[sequences, tokens]` with the tokens of other sequences masked: they
are deterministic, and NaN in one sequence stays there. Compiled, nothing of that size is materialized.

Only the device knows how many sequences a packed batch holds. Where no argument of the caller says it, there are as
many slots as tokens, and `exists` is a mask of the slots in use.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._checks import INTEGERS, check_batch, check_per_token


@dataclass(frozen=True)
class Sequences:
    mask: Tensor  # [B, S], True where a token counts
    ids: Tensor | None  # [1, T], for a packed batch
    slots: int  # the size of a tensor with one value for each sequence
    member: Tensor | None  # [slots, T], True where a token is in a sequence; for a packed batch
    lengths: Tensor  # [slots], the number of tokens that count, float32
    num_present: Tensor | None  # [], the number of sequences; None where all slots are in use

    @classmethod
    def from_rows(cls, mask: Tensor) -> "Sequences":
        return cls(mask, None, mask.shape[0], None, mask.sum(-1, dtype=torch.float32), None)

    @classmethod
    def from_ids(cls, mask: Tensor, ids: Tensor, count: int | None) -> "Sequences":
        slots = mask.shape[1] + mask.shape[1] % 2 if count is None else count
        member = ids == torch.arange(slots, device=ids.device, dtype=ids.dtype).unsqueeze(1)
        lengths = (member & mask).sum(-1, dtype=torch.float32)
        num_present = F.pad(ids, (0, 1), value=-1).amax() + 1 if count is None else None
        return cls(mask, ids, slots, member, lengths, num_present)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values [B, S]`, 0 where a token does not count, over each sequence's tokens: `[slots]`."""
        if self.member is None:
            return values.sum(-1)
        return torch.where(self.member, values, 0.0).sum(-1)

    def token_means(self, values: Tensor) -> Tensor:
        """Average over each sequence's tokens that count: `[slots]`, 0 over none."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Expand one value for each sequence, `[slots]`, to its tokens: `[B, S]`."""
        if self.member is None:
            return values.unsqueeze(-1).expand(self.mask.shape)
        return torch.where(self.member, values.unsqueeze(-1), 0.0).sum(0, keepdim=True)

    def positions(self) -> Tensor:
        """Count the tokens of a token's sequence up to and including it: `[B, S]`."""
        if self.member is None:
            return self.mask.cumsum(-1)
        return torch.where(self.member, (self.member & self.mask).cumsum(-1), 0).sum(0, keepdim=True)

    def mean(self, values: Tensor) -> Tensor:
        """Average `[slots]` over the sequences."""
        return masked_mean(values, self.exists())

    def num_sequences(self) -> Tensor | int:
        """Return the number of sequences, at least 1 in a packed batch."""
        exists = self.exists()
        return self.slots if exists is None else exists.sum().clamp(min=1)

    def exists(self, in_pairs: bool = False) -> Tensor | None:
        """Return the mask of the sequences or pairs that exist, `[slots]` or `[slots / 2]`; None if all do."""
        if self.num_present is None:
            return None
        slots, num_present = self.slots, self.num_present
        if in_pairs:
            slots, num_present = slots // 2, (num_present + 1) // 2
        return torch.arange(slots, device=self.mask.device, dtype=torch.int64) < num_present

    def halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split `[slots]` into chosen and rejected: the halves of a padded batch, even and odd in a packed one."""
        if self.ids is None:
            return values[: self.slots // 2], values[self.slots // 2 :]
        return values[0::2], values[1::2]

    def checked(self, loss: Tensor) -> Tensor:
        """Return the loss, NaN if a token that counts has a sequence index out of range."""
        if self.ids is None:
            return loss
        out_of_range = self.mask & ((self.ids < 0) | (self.ids >= self.slots))
        return torch.where(out_of_range.any(), float("nan"), loss)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average over the mask, 0 over none; a mask of None is all True."""
    if mask is None:
        return values.sum() / max(values.shape[0], 1)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def make_sequences(
    input: Any,
    linear_weight: Any,
    target: Any,
    ignore_index: int,
    sequence_ids: Any,
    count: int | None = None,
    in_pairs: bool = False,
) -> Sequences:
    """Check a batch and return its sequences; `count` is the number in a packed batch if an argument gives it."""
    check_batch(input, linear_weight, target)
    B = target.shape[0]
    mask = target.long() != ignore_index  # int32 would wrap an index that it does not hold
    if sequence_ids is None:
        if in_pairs and B % 2:
            raise ValueError(f"input: expected an even number of sequences, chosen and then rejected, got {B}")
        return Sequences.from_rows(mask)
    check_per_token("sequence_ids", sequence_ids, target, INTEGERS)
    if B != 1:
        raise ValueError(f"sequence_ids: expected input of shape [1, T, H] with it, got {tuple(input.shape)}")
    if count is not None and in_pairs and count % 2:
        raise ValueError(f"num_sequences: expected an even number, chosen and rejected by turns, got {count}")
    return Sequences.from_ids(mask, sequence_ids, count)


def resolve_num_sequences(num_sequences: int | None, name: str, sequence_values: Any) -> int | None:
    """Return `num_sequences`, or else the length of an argument with one value for each sequence."""
    given = sequence_values.shape[0] if isinstance(sequence_values, Tensor) and sequence_values.dim() == 1 else None
    if num_sequences is not None and num_sequences < 0:
        raise ValueError(f"num_sequences: expected None or a number of at least 0, got {num_sequences}")
    if num_sequences is not None and given is not None and given != num_sequences:
        raise ValueError(f"{name}: expected shape ({num_sequences},) (num_sequences), got ({given},)")
    return given if num_sequences is None else num_sequences
