"""The common beginning of every loss: checks of its arguments, its sequences, and the projection to the vocabulary.

A padded batch has a sequence a row. A packed one has a single row and an index for each token, in any order.
Sums over the sequences of a packed batch reduce `[sequences, tokens]` with the tokens of other sequences masked: they
are deterministic, and NaN in one sequence stays there. Compiled, nothing of that size is materialized.

Only the device knows how many sequences a packed batch holds. Where no argument of the caller says it, there are as
many slots as tokens, and `exists` is a mask of the slots in use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._ranks import ALONE, Ranks, make_ranks, share_with, sum_over
from llmk.ops.linear_loss.chunked import VocabSlice, vocab_slice
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce
from llmk.ops.linear_loss.fused_linear_policy import fused_linear_policy, outside_support
from llmk.ops.linear_loss.fused_linear_preference import fused_linear_preference
from llmk.ops.linear_loss.head import Head, check_linear
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs
from llmk.ops.linear_loss.objectives.policy import PER_TOKEN, PolicyTerms
from llmk.ops.linear_loss.vocab_parallel_linear_ce import vocab_parallel_linear_ce
from llmk.registry import LARGEST, check_integer, check_not_negative, check_number, check_option, check_same, is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VocabGroup: TypeAlias = "ProcessGroup | str | VocabSlice | None"
"""The ranks that have all classes together, as a process group, its name, or this rank's slice; None for this one."""
NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
COUNTS = (*NUMBERS, *INTEGERS)
MASKS = (torch.bool, torch.int64, torch.int32)
PAIR_ORDERS = ("halves", "interleaved")
"""The places of pair i's two among B sequences, the chosen first: i and i + B / 2, or 2i and 2i + 1."""
KINDS = {NUMBERS: "numbers", INTEGERS: "integers", MASKS: "truth values (bool, or integers 0 and 1)"}


def check_tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], expected: str) -> None:
    """Check that `value` is a tensor of one of `dtypes`, which `expected` describes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor of {expected}, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected a tensor of {expected}, got dtype {str(value.dtype).removeprefix('torch.')}")


def check_is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


BATCH = ("input", "linear_weight", "target")
REFERENCE = ("ref_input", "ref_linear_weight", "ref_linear_bias")


def check_batch(input: Any, linear_weight: Any, target: Any, ignore_index: Any, names: Sequence[str] = BATCH) -> None:
    """Check `input [B, S, H]`, `linear_weight [V, H]` and `target [B, S]`; the operators check the rest."""
    x, w, t = names
    check_is_tensor(x, input)
    check_is_tensor(w, linear_weight)
    check_tensor(t, target, INTEGERS, KINDS[INTEGERS])
    check_integer("ignore_index", ignore_index, "an integer")
    if input.dim() != 3:
        raise ValueError(f"{x}: expected shape [B, S, H], got {tuple(input.shape)}")
    if linear_weight.dim() != 2:
        raise ValueError(f"{w}: expected shape [V, {input.shape[2]}] to fit {x}, got {tuple(linear_weight.shape)}")
    if target.shape != input.shape[:2]:
        raise ValueError(f"{t}: expected shape {tuple(input.shape[:2])} (of {x}), got {tuple(target.shape)}")


def check_per_token(
    name: str, value: Any, target: Tensor, dtypes: tuple[torch.dtype, ...] = NUMBERS, like: str = "target"
) -> None:
    """Check a tensor with one value for each token, in the shape of `target`, an argument that is called `like`."""
    check_tensor(name, value, dtypes, KINDS[dtypes])
    if value.shape != target.shape:
        raise ValueError(f"{name}: expected shape {tuple(target.shape)} (that of {like}), got {tuple(value.shape)}")
    check_same(name, value, like, target)


def own_classes(linear_weight: Tensor, vocab_group: VocabGroup) -> dict[str, Any]:
    """Return the operators' arguments that say which classes this rank has, none if it has all."""
    if vocab_group is None:
        return {}
    return {**(vocab_group if isinstance(vocab_group, dict) else vocab_slice(linear_weight, vocab_group))}


def check_per_sequence(
    name: str,
    value: Any,
    count: int,
    target: Tensor,
    dtypes: Sequence[torch.dtype] = NUMBERS,
    expected: str = "numbers",
) -> None:
    """Check a tensor with one value for each of `count` sequences."""
    check_tensor(name, value, dtypes, expected)
    if value.dim() != 1 or value.shape[0] != count:
        raise ValueError(f"{name}: expected shape ({count},) (one for each sequence), got {tuple(value.shape)}")
    check_same(name, value, "target", target)


def check_between(name: str, value: Any, low: float, high: float) -> None:
    check_number(name, value, low, high, f"a number from {low:g} to {high:g}")


def check_denominator(name: str, value: Any) -> None:
    """Check a number, or a tensor of one, by which a sum is divided; None is the batch's own."""
    if isinstance(value, Tensor):
        check_tensor(name, value, COUNTS, "one number")
        if value.numel() != 1:
            raise ValueError(f"{name}: expected a scalar, got shape {tuple(value.shape)}")
    elif value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a scalar tensor or a number, got {type(value).__name__}")
    elif value is not None:
        check_not_negative(name, value)


def check_list(name: str, values: Any, expected: str) -> None:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name}: expected a list of {expected}, got {type(values).__name__}")


def denominator_of(value: Tensor | float) -> Tensor | float:
    """Return what a sum is divided by, 1 for 0: a sum over nothing, or with weights of 0, stays 0.

    Every mean of `llmk.losses` has this denominator. A part of a step's count, or a sum of weights, may be below 1.
    """
    if isinstance(value, int):
        return max(value, 1)
    if not isinstance(value, Tensor):
        return value or 1
    value = value.detach().reshape(())
    return torch.where(value == 0, 1, value.float() if value.is_floating_point() else value)


@dataclass(frozen=True)
class Sequences:
    """The sequence of each token, in a padded batch or a packed one, and sums over sequences.

    Sums are over all ranks that share the batch. `sum` adds up a sequence's tokens on them, and `expand_to_tokens` is
    its adjoint: what comes back from the tokens on all ranks is added up too.
    """

    mask: Tensor  # [B, S], True where a token counts
    ids: Tensor | None  # [1, T], for a packed batch
    slots: int  # the size of a tensor with one value for each sequence
    member: Tensor | None  # [slots, T], True where a token is in a sequence; for a packed batch
    lengths: Tensor  # [slots], the number of tokens that count, float32
    exists: Tensor | None  # the mask of the sequences, [slots], or of the pairs in a batch of pairs; None if all do
    count: Tensor | int  # the number of these on all ranks
    num_tokens: Tensor  # [], the tokens that count on all ranks
    ranks: Ranks
    pair_order: str | None = None  # one of PAIR_ORDERS in a batch of pairs

    @classmethod
    def from_rows(cls, mask: Tensor, pair_order: str | None = None) -> "Sequences":
        lengths, slots = mask.sum(-1, dtype=torch.float32), mask.shape[0]
        count = slots if pair_order is None else slots // 2
        return cls(mask, None, slots, None, lengths, None, count, mask.sum(), ALONE, pair_order)

    @classmethod
    def from_ids(cls, mask: Tensor, ids: Tensor, count: int | None, pair_order: str | None = None) -> "Sequences":
        slots = mask.shape[1] + mask.shape[1] % 2 if count is None else count
        member = ids == torch.arange(slots, device=ids.device, dtype=ids.dtype).unsqueeze(1)
        lengths = (member & mask).sum(-1, dtype=torch.float32)
        exists, group = None, 1 if pair_order is None else 2
        number: Tensor | int = slots // group
        if count is None:
            first = torch.arange(0, slots, group, device=ids.device, dtype=torch.int64)  # of a pair
            exists = first < F.pad(ids, (0, 1), value=-1).amax() + 1
            number = exists.sum()
        return cls(mask, ids, slots, member, lengths, exists, number, mask.sum(), ALONE, pair_order)

    def shared_by(self, ranks: Ranks) -> "Sequences":
        """Return the same with the lengths and numbers of all ranks."""
        if not ranks.tokens:
            return self
        count = self.count
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.int64, device=self.mask.device)
        return replace(
            self,
            ranks=ranks,
            lengths=sum_over(ranks.context, self.lengths),
            num_tokens=sum_over(ranks.tokens, self.num_tokens),
            count=sum_over(ranks.sequences, count),
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values [B, S]`, 0 where a token does not count, over each sequence's tokens: `[slots]`."""
        own = values.sum(-1) if self.member is None else torch.where(self.member, values, 0.0).sum(-1)
        return sum_over(self.ranks.context, own)

    def token_means(self, values: Tensor) -> Tensor:
        """Average over each sequence's tokens that count: `[slots]`, 0 over none."""
        return self.sum(values) / self.lengths.clamp(min=1.0)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Expand one value for each sequence, `[slots]`, to its tokens: `[B, S]`."""
        values = share_with(self.ranks.context, values)
        if self.member is None:
            return values.unsqueeze(-1).expand(self.mask.shape)
        return torch.where(self.member, values.unsqueeze(-1), 0.0).sum(0, keepdim=True)

    def per_token(self, values: Tensor) -> Tensor:
        """Expand `[slots]` or `[B, S]` to detached `[B, S]`, 0 where a token does not count."""
        values = values.detach().float()
        return torch.where(self.mask, self.expand_to_tokens(values) if values.dim() == 1 else values, 0.0)

    def positions(self) -> Tensor:
        """Count the tokens of a token's sequence up to and including it: `[B, S]`."""
        if self.member is None:
            return self.mask.cumsum(-1)
        return torch.where(self.member, (self.member & self.mask).cumsum(-1), 0).sum(0, keepdim=True)

    def total(self, loss: Tensor) -> Tensor:
        """Sum over the ranks what each has of its own tokens."""
        return sum_over(self.ranks.tokens, loss)

    def mean(self, values: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Average over the sequences, or over the pairs in a batch of these, or divide their sum by `num_items`.

        The mean over none is 0.
        """
        (mean,) = self.means(values, num_items=num_items)
        return mean

    def means(self, *values: Tensor, num_items: Tensor | float | None = None) -> list[Tensor]:
        """Return the `mean` of each."""
        exists, denominator, means = self.exists, self.denominator(num_items), []
        for each in values:
            total = each.sum() if exists is None else torch.where(exists, each, 0.0).sum()
            means.append(sum_over(self.ranks.sequences, total) / denominator)
        return means

    def denominator(self, num_items: Tensor | float | None = None) -> Tensor | float:
        """Return `num_items`, or the number of sequences, or of pairs in a batch of these, or 1 for 0."""
        return denominator_of(self.count if num_items is None else num_items)

    def halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split `[slots]` into chosen and rejected, of each pair one."""
        if self.pair_order == "halves":
            return values[: self.slots // 2], values[self.slots // 2 :]
        return values[0::2], values[1::2]

    def joined(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return `[slots]` of which these are the `halves`."""
        if self.pair_order == "halves":
            return torch.cat([chosen, rejected])
        return torch.stack([chosen, rejected], -1).flatten()

    def checked(self, loss: Tensor) -> Tensor:
        """Return the loss, NaN if a token that counts has a sequence index out of range."""
        if self.ids is None:
            return loss
        out_of_range = (self.mask & ((self.ids < 0) | (self.ids >= self.slots))).any()
        if self.ranks.tokens:
            out_of_range = sum_over(self.ranks.tokens, out_of_range.long()) > 0
        return torch.where(out_of_range, float("nan"), loss)


def make_sequences(
    mask: Tensor, sequence_ids: Any, count: int | None, order: str | None, ranks: Ranks, of: Tensor,
    names: tuple[str, str] = ("input", "target"),
) -> Sequences:  # fmt: skip
    """Return the sequences of a checked batch from the mask of its tokens, in pairs if these have an order.

    `count` is the number of sequences in a packed batch if an argument gives it. Messages name `of`, which has a value
    or more for each token, and what has the mask's shape.
    """
    B, (name, like) = mask.shape[0], names
    if sequence_ids is None:
        if order is not None and B % 2:
            raise ValueError(f"{name}: expected an even number of sequences, a chosen and a rejected a pair, got {B}")
        return Sequences.from_rows(mask, order).shared_by(ranks)
    check_per_token("sequence_ids", sequence_ids, mask, INTEGERS, like)
    if B != 1:
        expected = "[1, T, H]" if of.dim() == 3 else "[1, T]"
        raise ValueError(f"sequence_ids: expected {name} of shape {expected} with it, got {tuple(of.shape)}")
    if count is not None and order is not None and count % 2:
        raise ValueError(f"num_sequences: expected an even number, a chosen and a rejected a pair, got {count}")
    if count is None and order == "halves":
        raise ValueError("num_sequences: expected the number of sequences with pair_order 'halves', got None")
    if count is None and ranks.context:  # whose slots must be the same
        raise ValueError("num_sequences: expected the same number on all ranks of context_group, got None")
    return Sequences.from_ids(mask, sequence_ids, count, order).shared_by(ranks)


def resolve_pair_order(pair_order: str | None, sequence_ids: Tensor | None) -> str:
    """Return the order of a batch's pairs, which a packed batch has to say."""
    if pair_order is None and sequence_ids is not None:
        raise ValueError(
            "pair_order: expected 'halves' or 'interleaved' with sequence_ids, as no order is usual in a packed batch, "
            "got None"
        )
    if pair_order is None:
        return "halves"
    check_option("pair_order", pair_order, PAIR_ORDERS)
    return pair_order


def resolve_num_sequences(num_sequences: int | None, name: str, sequence_values: Any) -> int | None:
    """Return `num_sequences`, or else the length of an argument with one value for each sequence."""
    given = sequence_values.shape[0] if isinstance(sequence_values, Tensor) and sequence_values.dim() == 1 else None
    if num_sequences is not None:
        check_integer("num_sequences", num_sequences, "None or an integer of at least 0")
        check_number("num_sequences", num_sequences, 0, LARGEST, "None or an integer of at least 0")
    if num_sequences is not None and given is not None and given != num_sequences:
        raise ValueError(f"{name}: expected shape ({num_sequences},) (num_sequences), got ({given},)")
    return given if num_sequences is None else num_sequences


def cross_entropy_sum(head: Head, target: Tensor, **options: Any) -> Tensor:
    """Return the cross entropy at temperature 1, summed over tokens, with options of `fused_linear_ce`."""
    without, operator = ("temperature", "logit_scale"), vocab_parallel_linear_ce
    if not head.group_name:
        without, operator = (*without, *VocabSlice.__annotations__), fused_linear_ce
    return operator(target=target, reduction="sum", **head.arguments(without), **options)


@dataclass(frozen=True)
class Batch:
    """A batch of sequences: its tokens, and the projection of their hidden states `[B, S, H]`."""

    arguments: Mapping[str, Any]  # of the function
    head: Head
    target: Tensor  # [B, S]
    sequences: Sequences
    support: Tensor | None  # [B, S, L]
    outside: dict[str, Tensor]  # the metric of the targets that are not in their supports, if there are these

    @classmethod
    def of(cls, arguments: Mapping[str, Any], counted_by: str = "num_sequences") -> "Batch":
        """Check what the arguments of a function have in common with those of others, and return it.

        Args:
            arguments: The function's arguments by their names, of which it has those of this kind that it offers.
                With a `pair_order` two sequences are a pair, a chosen and a rejected one.
            counted_by: The argument with one value for each sequence, whose length is the number of sequences.
        """
        ranks = make_ranks(arguments["group"], arguments.get("context_group"))
        count = resolve_num_sequences(arguments.get("num_sequences"), counted_by, arguments.get(counted_by))
        ids, support = arguments.get("sequence_ids"), arguments.get("support")
        order = resolve_pair_order(arguments["pair_order"], ids) if "pair_order" in arguments else None
        check_batch(*[arguments[name] for name in (*BATCH, "ignore_index")])
        own = own_classes(arguments["linear_weight"], arguments.get("vocab_group"))
        head, target, outside = Head.of(arguments, **own), arguments["target"], {}
        if support is not None:
            target, outside = _without_unsupported(head, target, support, ranks)
        mask = target.long() != head.ignore_index  # int32 would wrap an index that it does not hold
        sequences = make_sequences(mask, ids, count, order, ranks, head.input)
        return cls(arguments, head, target, sequences, support, outside)

    def per_token(self, name: str) -> Tensor | None:
        """Check an argument with one value for each token, or None, and return its `Sequences.per_token`."""
        value = self.arguments[name]
        if value is None:
            return None
        check_per_token(name, value, self.target)
        return self.sequences.per_token(value)

    def logprobs(self, target: Tensor | None = None, add_tail: bool = False) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities and the entropies, float32, 0 where a token does not count."""
        target = self.target if target is None else target
        return linear_logprobs(target=target, support=self.support, add_tail=add_tail, **self.head.arguments())

    def with_head(self, **changes: Any) -> "Batch":
        return replace(self, head=replace(self.head, **changes))

    def log_sum_sq_probs(self, logprobs: Tensor) -> Tensor:
        """Compute log sum_v p_v^2 of each token from the targets' log-probabilities, detached, with one product more.

        With logits z it is logsumexp(2z) - 2 logsumexp(z): twice the target's log-probability, less that at half the
        temperature. 0 where a token does not count.
        """
        with torch.no_grad():
            sharper, _ = self.with_head(temperature=self.head.temperature / 2).logprobs()
        return 2 * logprobs.detach() - sharper

    def reference_logps(self, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the reference model's log-probabilities `[slots]`: `ref_logps`, or the `total` of those of tokens.

        Either they are given, or the model's hidden states and projection.
        """
        arguments = self.arguments
        logps = arguments["ref_logps"]
        if logps is not None:
            for name in REFERENCE:
                if arguments[name] is not None:
                    kind = type(arguments[name]).__name__
                    raise ValueError(f"{name}: expected None beside ref_logps, got a {kind}")
            check_per_sequence("ref_logps", logps, self.sequences.slots, self.target)
            return logps.detach().float()
        hidden, weight, bias = [arguments[name] for name in REFERENCE]
        _check_reference(self.head, hidden, weight, bias)
        bias = None if bias is None else bias.detach()
        model = self.with_head(input=hidden.detach(), linear_weight=weight.detach(), linear_bias=bias)
        return total(model.logprobs()[0]).detach().float()

    @property
    def in_rows(self) -> bool:
        """True if each row has a whole sequence."""
        return self.sequences.ids is None and not self.sequences.ranks.context

    @property
    def supports_groups(self) -> bool:
        """True if `preference` takes the batch: whole sequences in rows, and no DTensor."""
        return self.in_rows and not is_sharded(self.head.linear_weight)

    def preference(self, ref_logps: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Call `fused_linear_preference` with pairs for groups, or single sequences where these are in no pairs.

        Tensors with a value for each sequence or token are `[B]` or `[B, S]`. Return the loss, a sum over groups on all
        ranks, log-probabilities and entropies.
        """
        order, B = self.sequences.pair_order, self.target.shape[0]
        by_halves, group = order == "halves", 1 if order is None else 2

        def to_groups(values: Tensor) -> Tensor:
            if by_halves:
                return values.reshape(group, B // group, *values.shape[1:]).transpose(0, 1)
            return values.reshape(B // group, group, *values.shape[1:])

        def from_groups(values: Tensor) -> Tensor:
            return (values.transpose(0, 1) if by_halves else values).flatten(0, 1)

        options["ref_logps"] = ref_logps
        for name in ("ref_logps", "token_weight", "nll_weight"):
            if options.get(name) is not None:
                options[name] = to_groups(options[name])
        given = self.head.arguments() | {"input": to_groups(self.head.input), "target": to_groups(self.target)}
        loss, logprobs, entropy = fused_linear_preference(**given, **options)
        return sum_over(self.sequences.ranks.sequences, loss), from_groups(logprobs), from_groups(entropy)

    def policy(self, terms: PolicyTerms) -> tuple[Tensor, Tensor, Tensor]:
        """Call `fused_linear_policy`, or compute the loss from `logprobs` where it does not take the batch.

        Return the loss, a sum over all ranks, and the detached log-probabilities and entropies `[B, S]`.
        """
        head, by_tokens = self.head, terms.options.importance_sampling_level == "token"
        if is_sharded(head.input, head.linear_weight, self.target) or not (by_tokens or self.in_rows):
            logprobs, entropy = self.logprobs()
            return self.sequences.total(terms.loss(logprobs, entropy)), logprobs.detach(), entropy.detach()
        loss, logprobs, entropy = fused_linear_policy(
            target=self.target, support=self.support, **{name: getattr(terms, name) for name in PER_TOKEN},
            **terms.options._asdict(), **head.arguments(),
        )  # fmt: skip
        return self.sequences.total(loss), logprobs, entropy


def _without_unsupported(head: Head, target: Tensor, support: Any, ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the targets, `ignore_index` where one is not in the token's support, and the metric of how many are not.

    A target that is no class stays, so that the operators refuse it. A support without ids has all classes.
    """
    check_tensor("support", support, INTEGERS, KINDS[INTEGERS])
    if support.dim() != 3 or support.shape[:2] != target.shape:
        expected = f"({target.shape[0]}, {target.shape[1]}, L) (that of target, and L ids)"
        raise ValueError(f"support: expected shape {expected}, got {tuple(support.shape)}")
    check_same("support", support, "target", target)
    outside = outside_support(target, support, head.ignore_index, head.all_classes)
    classes = target.long()
    num_outside = sum_over(ranks.tokens, outside.sum(dtype=torch.float32))
    num_tokens = sum_over(ranks.tokens, (classes != head.ignore_index).sum())
    metric = {"outside_support": num_outside / denominator_of(num_tokens)}
    return classes.masked_fill(outside, head.ignore_index), metric


def mean_over_tokens(values: Tensor, sequences: Sequences) -> Tensor:
    """Average `values [B, S]`, 0 where a token does not count, over the tokens that count; 0 over none."""
    return sum_over(sequences.ranks.tokens, values.sum()) / denominator_of(sequences.num_tokens)


def _check_reference(head: Head, ref_input: Any, ref_linear_weight: Any, ref_linear_bias: Any) -> None:
    """Check the reference model's hidden states and projection."""
    if ref_input is None and ref_linear_weight is None:
        raise ValueError(
            "ref_logps: expected log-probabilities of the reference model, one for each sequence, or in their place "
            "ref_input and ref_linear_weight, got None"
        )
    for name, value in (("ref_input", ref_input), ("ref_linear_weight", ref_linear_weight)):
        if value is None:
            raise ValueError(f"{name}: expected a tensor where ref_logps is None, got None")
    check_other_model(head.input, ref_input, ref_linear_weight, ref_linear_bias, REFERENCE)
    if ref_linear_weight.shape[0] != head.linear_weight.shape[0]:
        classes, got = head.linear_weight.shape[0], ref_linear_weight.shape[0]
        raise ValueError(f"ref_linear_weight: expected the classes of linear_weight, {classes}, got {got}")


def check_other_model(input: Tensor, hidden: Any, weight: Any, bias: Any, names: Sequence[str]) -> None:
    """Check another model's hidden states and projection, which are arguments of these names."""
    x, w, b = names
    check_is_tensor(x, hidden)
    check_is_tensor(w, weight)
    if bias is not None:
        check_is_tensor(b, bias)
    if hidden.dim() != 3 or hidden.shape[:2] != input.shape[:2]:
        expected = f"({input.shape[0]}, {input.shape[1]}, H)"
        raise ValueError(f"{x}: expected shape {expected} like input, got {tuple(hidden.shape)}")
    check_same(x, hidden, "input", input)
    check_linear(hidden, weight, bias, (x, w, b))
