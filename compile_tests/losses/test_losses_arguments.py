"""Each argument of each loss with values that it does not take: the error names it, and what it was expected to be."""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_calls import numbers
from compile_tests.helpers.wrong_arguments import complete, not_named, wrong_sizes, wrong_values
from llmk import losses, rl

B, S, H, V = 4, 5, 8, 11


X, W = numbers(B, S, H), numbers(V, H)
T = (torch.arange(B * S).view(B, S) % V).masked_fill(torch.arange(S) == 4, -100)
HIDDEN, PROJECTION, BIAS = numbers(B, S, 6), numbers(V, 6), numbers(V)
LOGPS, EACH, TOKENS = numbers(B, S) - 3, numbers(B), {"input": X, "linear_weight": W, "target": T, "linear_bias": BIAS}
IDS, TOP = T.clamp(min=0).unsqueeze(-1).repeat(1, 1, 2) % 9 + torch.tensor([0, 1]), numbers(B, S, 2) - 2
REFERENCE = {"ref_input": HIDDEN, "ref_linear_weight": PROJECTION, "ref_linear_bias": BIAS}
ITEMS = {"num_items_in_batch": torch.tensor(7)}
LABEL = torch.tensor([True, False, True, True])
POLICY = {"advantages": EACH, "max_log_ratio": 3.0, "support": T.unsqueeze(-1), **ITEMS}
OLD = {"old_per_token_logps": LOGPS, "clip_ratio_c": 3.0, "max_completion_length": 7, "num_sequences_in_batch": 4.0}
SAMPLER = {"sampling_per_token_logps": LOGPS, "off_policy_mask_threshold": 1.0, "importance_sampling_ratio": LOGPS}
VALUES = {"values": LOGPS, "old_values": LOGPS, "returns": LOGPS}
ONE_TEACHER = {"teacher_input": HIDDEN, "teacher_linear_weight": PROJECTION, "teacher_linear_bias": BIAS}
TEACHERS = {
    "teacher_input": [HIDDEN, HIDDEN],
    "teacher_linear_weight": [PROJECTION, PROJECTION[:7]],
    "teacher_linear_bias": [BIAS, BIAS[:7]],
    "vocab_map": [None, torch.arange(7)],
    "teacher_temperature": [1.0, 2.0],
    "teacher_logit_scale": [1.0, 2.0],
    "teacher_softcap": [0.0, 2.0],
    "teacher_ids": [IDS],
    "teacher_logprobs": [TOP],
}
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (losses.sft, {**TOKENS, **ITEMS, "token_weights": LOGPS}),
    (losses.dft, {**TOKENS, **ITEMS}),
    (losses.multi_token, {"inputs": [X, X], "linear_weight": W, "targets": [T, T], "head_weights": [1.0, 0.5]}),
    (losses.dpo, {**TOKENS, **ITEMS, "ref_logps": EACH}),
    (losses.dpo, {**TOKENS, **REFERENCE, "loss_type": ["sigmoid"], "loss_weights": [1.0], "ld_alpha": 0.5}),
    (losses.cpo, {**TOKENS, **ITEMS}),
    (losses.simpo, {**TOKENS, **ITEMS}),
    (losses.orpo, {**TOKENS, **ITEMS, "num_chosen_tokens_in_batch": torch.tensor(7)}),
    (losses.kto, {**TOKENS, **ITEMS, "label": LABEL, "ref_logps": EACH, "kl": torch.tensor(0.1)}),
    (losses.kto, {**TOKENS, "label": LABEL, **REFERENCE, "kl": 0.1}),
    (losses.grpo, {**TOKENS, **POLICY, **OLD, **SAMPLER, "ref_per_token_logps": LOGPS, "beta": 0.1, "delta": 3.0}),
    (losses.reinforce, {**TOKENS, **ITEMS, "advantages": EACH}),
    (losses.rloo, {**TOKENS, **POLICY, "old_logps": EACH, "epsilon_high": 0.3}),
    (losses.ppo, {**TOKENS, **POLICY, **OLD, **VALUES}),
    (losses.sampling_ratio, {"logps": LOGPS, "sampler_logps": LOGPS, "mask": T != -100, "low": 0.1}),
    (losses.distill, {**TOKENS, **ONE_TEACHER, "token_weights": LOGPS.exp(), "ce_weight": 0.5}),
    (losses.distill, {**TOKENS, **TEACHERS, "teacher_weight": torch.ones(3)}),
    (losses.distill_topk, {**TOKENS, "teacher_ids": IDS, "teacher_logprobs": TOP}),
    (rl.logprobs, {"hidden": X, "weight": W, "labels": T, "bias": BIAS}),
    (losses.draft, {**TOKENS, **ONE_TEACHER, "vocab_map": torch.arange(V), "token_weights": LOGPS.exp()}),
    (losses.info_nce, {"query": X[0], "key": X[1], "negatives": X[2], "temperature": torch.tensor(0.5)}),
    (losses.late_interaction, {"query": X, "document": X, "query_mask": T != -100, "temperature": torch.tensor(0.5)}),
]
IDENTIFIERS = [f"{fn.__name__}-{i}" for i, (fn, _) in enumerate(CALLS)]


def wrong(value: Any) -> Iterator[Any]:
    """Of another kind, with more axes, or one more of a list."""
    yield from (*wrong_values(value), *islice(wrong_sizes(value), 1))


@pytest.mark.parametrize(("fn", "given"), CALLS, ids=IDENTIFIERS)
def test_an_error_names_the_argument(fn: Callable[..., Any], given: dict[str, Any]) -> None:
    arguments = complete(fn, given)
    fn(**arguments)
    assert not_named(fn, arguments, kinds=wrong) == []


@pytest.mark.parametrize("name", ["ref_input", "ref_linear_weight", "ref_linear_bias"])
def test_a_reference_of_other_sizes(name: str) -> None:
    """The operators' own errors would name the policy's arguments."""
    options: dict[str, Any] = {**TOKENS, **REFERENCE}
    with pytest.raises(ValueError, match=rf"^(ref_linear_weight|{name}): expected"):
        losses.dpo(**options | {name: options[name][..., :-1]})
    with pytest.raises(ValueError, match="ref_linear_weight: expected the classes of linear_weight, 11, got 10"):
        losses.dpo(**options | {"ref_linear_weight": PROJECTION[:-1], "ref_linear_bias": None})


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf, torch.tensor(True), torch.tensor(1j)])
def test_a_count_that_is_none(count: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="num_items_in_batch: expected"):
        losses.sft(X, W, T, num_items_in_batch=count)


DIVIDED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (losses.sft, {}),
    (losses.dft, {}),
    (losses.dpo, {"ref_logps": EACH}),
    (losses.cpo, {"cpo_alpha": 0.0}),
    (losses.simpo, {}),
    (losses.kto, {"label": LABEL, "ref_logps": EACH}),
    (losses.grpo, {"advantages": EACH}),
    (losses.reinforce, {"advantages": EACH}),
    (losses.rloo, {"advantages": EACH}),
    (losses.ppo, {"advantages": EACH}),
    (losses.distill, {"teacher_input": HIDDEN, "teacher_linear_weight": PROJECTION}),
    (losses.distill_topk, {"teacher_ids": IDS, "teacher_logprobs": TOP}),
    (losses.draft, {"teacher_input": HIDDEN, "teacher_linear_weight": PROJECTION}),
]


@pytest.mark.parametrize(("fn", "given"), DIVIDED, ids=[fn.__name__ for fn, _ in DIVIDED])
def test_a_part_of_a_steps_count_may_be_below_one(fn: Callable[..., Any], given: dict[str, Any]) -> None:
    """The count may be a step's tokens by the processes; 0 stays a sum over nothing, and the loss is float32."""

    def loss(count: Any) -> Tensor:
        return fn(X, W, T, **given, num_items_in_batch=count)[0]

    right = loss(4.0)
    for count in (0.25, torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)):
        assert loss(count).dtype == torch.float32
        torch.testing.assert_close(loss(count), 16 * right)
    for count in (0, torch.tensor(0)):
        torch.testing.assert_close(loss(count), 4 * right)
