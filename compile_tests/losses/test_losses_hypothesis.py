"""Hypothesis over lengths, masks, padded and packed batches: what one sequence holds stays in that sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmk import losses

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

H, V = 4, 7
some = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=3)

OF_PAIRS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo aot": {"loss_type": "aot"},
    "dpo ipo": {"loss_type": ["ipo", "sft"], "ld_alpha": 0.5},
    "cpo": {"loss_type": "simpo", "simpo_gamma": 0.3},
    "orpo": {},
}
OF_SEQUENCES: dict[str, dict[str, Any]] = {
    "kto": {},
    "grpo": {"loss_type": "dapo", "entropy_coef": 0.1},
    "grpo gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "rloo": {},
}


def padded(sizes: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of so many tokens that count, others anywhere between them."""
    generator = torch.Generator().manual_seed(seed)
    B, S = len(sizes), max(sizes) + 2
    x, weight = (torch.randn(shape, generator=generator) for shape in ((B, S, H), (V, H)))
    target = torch.randint(0, V, (B, S), generator=generator)
    for row, size in zip(target, sizes, strict=True):
        row[torch.randperm(S, generator=generator)[: S - size]] = -100
    return x, weight, target


def others_of(name: str, B: int, places: list[int] | None = None) -> dict[str, Any]:
    """One number for each sequence, in the order of their places."""
    order = list(range(B)) if places is None else places
    of = torch.randn(B, generator=torch.Generator().manual_seed(B))[order]
    match name.split()[0]:
        case "dpo":
            return {"ref_logps": of - 5}
        case "kto":
            return {"label": of > 0, "ref_logps": of - 5}
        case "grpo" | "rloo":
            return {"advantages": of}
    return {} if places is None else {"num_sequences": B}


def run(name: str, x: Tensor, weight: Tensor, target: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients by hidden states and projection."""
    x, weight = (of.detach().requires_grad_() for of in (x, weight))
    options = (OF_PAIRS | OF_SEQUENCES)[name]
    loss, metrics = getattr(losses, name.split()[0])(x, weight, target, **others, **options)
    assert not any(value.requires_grad for value in metrics.values())
    dx, dw = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), dx, dw


def sizes_for(name: str, drawn: list[int]) -> list[int]:
    """A loss of pairs takes the drawn lengths for chosen completions; the rejected ones have others."""
    return [*drawn, *(5 - size for size in drawn)] if name in OF_PAIRS else drawn


@pytest.mark.parametrize("name", [*OF_PAIRS, *OF_SEQUENCES])
@some
@given(drawn=lengths, seed=st.integers(0, 99), chunk_size=st.sampled_from([0, 3, 16]), skip=st.booleans())
def test_packed_is_padded(name: str, drawn: list[int], seed: int, chunk_size: int, skip: bool) -> None:
    sizes = sizes_for(name, drawn)
    x, weight, target = padded(sizes, seed)
    B, half = len(sizes), len(sizes) // 2
    # Packed, chosen and rejected come by turns.
    order = [i // 2 + half * (i % 2) for i in range(B)] if name in OF_PAIRS else list(range(B))
    options = {"chunk_size": chunk_size, "skip_ignored": skip}
    of_rows = run(name, x, weight, target, **others_of(name, B), **options)
    keep = [target[i] != -100 for i in order]
    ids = torch.cat([torch.full((int(of.sum()),), i) for i, of in enumerate(keep)]).view(1, -1)
    flat = [torch.cat([of[i][kept] for i, kept in zip(order, keep, strict=True)]).unsqueeze(0) for of in (x, target)]
    others = others_of(name, B, order) | ({"pair_order": "interleaved"} if name in OF_PAIRS else {})
    of_packed = run(name, flat[0], weight, flat[1], sequence_ids=ids, **others, **options)
    torch.testing.assert_close(of_packed[0], of_rows[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(of_packed[2], of_rows[2], rtol=1e-4, atol=1e-5)
    rows = torch.cat([of_rows[1][i][kept] for i, kept in zip(order, keep, strict=True)])
    torch.testing.assert_close(of_packed[1][0], rows, rtol=1e-4, atol=1e-5)
    for result in (*of_rows, *of_packed):
        assert result.isfinite().all()
    assert not of_rows[1][target == -100].any()


@pytest.mark.parametrize("name", sorted({*OF_PAIRS, *OF_SEQUENCES} - {"dpo aot"}))  # which sorts all pairs
@pytest.mark.parametrize("packs", [False, True])
@some
@given(drawn=lengths, seed=st.integers(0, 99), place=st.integers(0, 5), bad=st.sampled_from(["nan", "inf", "-inf"]))
def test_nan_stays_in_its_sequence(name: str, packs: bool, drawn: list[int], seed: int, place: int, bad: str) -> None:
    """The gradients of the hidden states of other sequences, of other pairs, are what they were."""
    sizes = sizes_for(name, drawn)
    x, weight, target = padded(sizes, seed)
    B, place = len(sizes), place % len(sizes)
    spoiled = x.clone()
    spoiled[place] = float(bad)
    others = others_of(name, B)
    shape = target.shape
    if packs:
        if name in OF_PAIRS:  # by turns
            others = others_of(name, B, [i // 2 + B // 2 * (i % 2) for i in range(B)]) | {"pair_order": "interleaved"}
            ids = torch.cat([torch.arange(0, B, 2), torch.arange(1, B, 2)])
        else:
            ids = torch.arange(B)
        others["sequence_ids"] = ids.unsqueeze(1).expand(shape).reshape(1, -1)
        x, spoiled, target = (of.reshape(1, -1, *of.shape[2:]) for of in (x, spoiled, target))
    before, after = (run(name, of, weight, target, **others)[1].view(*shape, H) for of in (x, spoiled))
    group = [place % (B // 2), place % (B // 2) + B // 2] if name in OF_PAIRS else [place]
    rest = [i for i in range(B) if i not in group]
    torch.testing.assert_close(after[rest], before[rest], rtol=1e-5, atol=1e-6)
