"""A first step's ratio is 1: old and new policy by the same weights have the same bits."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_references import batch
from llmk import losses
from llmk.functional import linear_logprobs
from llmk.opcheck.promises.rows import products_by_row
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.kernels
LENGTHS = [3, 1, 2]
DTYPES = [torch.float32, torch.bfloat16]


def rows_apart(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Products whose rows are apart where the kernels are interpreted; a GPU's are its library's."""
    return products_by_row() if device.type == "cpu" else contextlib.nullcontext()


def old_logps(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return linear_logprobs(x, weight, target, **options)[0]


def step(x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, **options: Any) -> Sequence[Tensor]:
    """The loss of a step and its gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, _ = losses.grpo(x, weight, target, advantages, **options)
    return loss, *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_with_and_without_gradients(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, target = batch(LENGTHS, device, dtype)
    old = old_logps(x, weight, target)
    new, _ = linear_logprobs(x.requires_grad_(), weight.requires_grad_(), target)
    assert new.requires_grad
    assert torch.equal((new - old).exp(), torch.ones_like(new))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_step_is_that_of_a_ratio_of_1(device: torch.device, dtype: torch.dtype, level: str) -> None:
    """The ratio is 1 by definition without old log-probabilities."""
    x, weight, target = batch(LENGTHS, device, dtype)
    advantages = torch.randn(len(LENGTHS), dtype=torch.float32).to(device)
    options: dict[str, Any] = {"importance_sampling_level": level, "beta": 0.1}
    options["ref_per_token_logps"] = old_logps(x, weight + 0.1 * weight.abs(), target)
    old = old_logps(x, weight, target)
    on_policy = step(x, weight, target, advantages, **options)
    for by_weights, by_definition in zip(
        step(x, weight, target, advantages, old_per_token_logps=old, **options), on_policy, strict=True
    ):
        assert torch.equal(by_weights, by_definition)
    moved = step(x, weight, target, advantages, old_per_token_logps=old + 2**-10, **options)
    assert not torch.equal(moved[1], on_policy[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_old_log_probabilities_of_other_batches(device: torch.device, dtype: torch.dtype) -> None:
    """A sequence at a time, in other chunks, and packed without padding."""
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("PyTorch's own sums on a CPU depend on the number of rows")
    x, weight, target = batch(LENGTHS, device, dtype)
    advantages = torch.randn(len(LENGTHS), dtype=torch.float32).to(device)
    with rows_apart(device):
        new, _ = linear_logprobs(x.requires_grad_(), weight, target)
        alone = [old_logps(x[i : i + 1], weight, target[i : i + 1]) for i in range(len(LENGTHS))]
        counts = target != -100
        packed = torch.zeros_like(new).masked_scatter(counts, old_logps(x[counts], weight, target[counts]))
        for old in (torch.cat(alone), old_logps(x, weight, target, chunk_size=3), packed):
            assert torch.equal(new, old)
        _, by_loss = losses.grpo(x, weight, target, advantages, old_per_token_logps=torch.cat(alone), epsilon=0.0)
    assert by_loss["clip_ratio/region_mean"] == 0
