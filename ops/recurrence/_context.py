"""A recurrence over sequences whose parts lie on ranks, in their order.

A part takes the state S before its first token to M S + B after its last one: B is the last state of the part from a
zero state, and M its decay, a factor for each channel of the keys, or with the delta rule the product of its
corrections, a matrix [K, K] for each head. Two parts in a row are (M' M, M' B + B'), so that pairs (B, M) are all that
ranks need of each other. Each rank computes its own, gets those of all, and goes on from the state before its tokens as
one process would: its outputs are rounded once. The backward pass is autograd's: the gather's is the sum over ranks, in
their order, of what each has for the pair of one.

Sent are K (V + K) float32 numbers for each value head and rank, or without the delta rule K (V + 1), whatever the
length of the parts. The pair costs a forward pass of its own, and in the backward pass a backward one.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from llmk.ops.common.collectives import gather_from_ranks, place_in
from llmk.ops.recurrence._chunks import Call, sequence_indices


def state_before(call: Call, last_state: Callable[[Call], Tensor], context_group: str) -> Tensor:
    """The state before this rank's first token `[B, H, K, V]`; `last_state` computes the one after a part's last.

    A rank goes on from the one before if its first token is of the sequence of that one's last. The sequence's own
    initial state is the first rank's.
    """
    rank, ranks = place_in(context_group, call.q, call.v)
    if call.q.shape[1] == 0:
        raise ValueError("context_group: expected at least one token on every rank, got 0")
    initial, V = call.initial_state if rank == 0 else None, call.v.shape[3]
    part = replace(call, initial_state=initial)
    corrects = call.beta is not None
    pair = last_state(_with_identity(part)) if corrects else torch.cat([last_state(part), _decay_of(part)], -1)
    pairs = gather_from_ranks(pair.unsqueeze(0), ranks, context_group)
    goes_on = _goes_on(call.sequence_ids, ranks, context_group)
    # Every rank's result depends on what was gathered, so that every rank takes part in the backward pass.
    state = pairs[:0].sum(0)[..., :V]
    state = state if initial is None else state + initial
    for before in range(rank):
        last, decay = pairs[before, ..., :V], pairs[before, ..., V:]
        state = last + (decay @ state if corrects else decay * state)
        if goes_on is not None:
            state = torch.where(goes_on[before, :, None, None, None], state, 0.0)
    return state


def _decay_of(part: Call) -> Tensor:
    """The part's decay `[B, H, K, 1]`, float32: 0 where its last token is of another sequence than its first."""
    decay = part.g.float().sum(1).exp()
    decay = (decay.unsqueeze(-1) if part.g.dim() == 3 else decay).unsqueeze(-1)
    if part.sequence_ids is not None:
        decay = torch.where(sequence_indices(part.sequence_ids)[:, -1].view(-1, 1, 1, 1) == 0, decay, 0.0)
    return decay.expand(-1, -1, part.q.shape[3], 1)


def _with_identity(part: Call) -> Call:
    """A call whose last state is the pair `[B, H, K, V + K]`: K more columns, 0 after an identity."""
    (B, T, H, V), K, v = part.v.shape, part.q.shape[3], part.v
    one = torch.eye(K, dtype=torch.float32, device=v.device).expand(B, H, K, K)
    state = part.initial_state
    state = torch.zeros((B, H, K, V), dtype=torch.float32, device=v.device) if state is None else state
    values = torch.cat([v, torch.zeros((B, T, H, K), dtype=v.dtype, device=v.device)], -1)
    return replace(part, v=values, initial_state=torch.cat([state, one], -1))


def _goes_on(sequence_ids: Tensor | None, ranks: int, context_group: str) -> Tensor | None:
    """Return whether the token after each rank but the last is of its last token's sequence `[ranks - 1, B]`."""
    if sequence_ids is None:
        return None
    ends = torch.stack([sequence_ids[:, 0], sequence_ids[:, -1]]).unsqueeze(0)
    ends = gather_from_ranks(ends, ranks, context_group)
    return ends[:-1, 1] == ends[1:, 0]
