"""A call of every function of `llmk.losses`, on a batch of sequences of any lengths, and its gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_tests.helpers.loss_references import batch
from llmk import losses

Inputs = tuple[Tensor, Tensor, Tensor]


def numbers(*shape: int) -> Tensor:
    """The same for the same shape."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sum(shape)), device="cpu")


def of_dpo(B: int, S: int) -> dict[str, Any]:
    return {"ref_logps": numbers(B), "num_items_in_batch": torch.tensor(5)}


def of_dpo_types(B: int, S: int) -> dict[str, Any]:
    types = ["robust", "aot_unpaired", "ipo", "exo_pair"]
    return {
        "ref_input": numbers(B, S, 5),
        "ref_linear_weight": numbers(37, 5),
        "ld_alpha": 0.5,
        "loss_type": types,
        "label_smoothing": 0.1,
    }


def of_gspo(B: int, S: int) -> dict[str, Any]:
    return {
        "advantages": numbers(B),
        "old_per_token_logps": numbers(B, S) - 3,
        "ref_per_token_logps": numbers(B, S) - 3,
        "beta": 0.1,
        "loss_type": "grpo",
        "epsilon": 30.0,
        "importance_sampling_level": "sequence",
        "top_entropy_quantile": 0.6,
        "importance_sampling_ratio": numbers(B, S).exp(),
        "sampling_per_token_logps": numbers(B, S) - 3,
    }


def of_grpo(B: int, S: int) -> dict[str, Any]:
    old = numbers(B, S) - 3
    return {"advantages": numbers(B), "old_per_token_logps": old, "epsilon_high": 30.0, "entropy_coef": 0.1}


def of_reinforce(B: int, S: int) -> dict[str, Any]:
    return {"advantages": numbers(B), "loss_agg": "sequence_mean", "count_empty_sequences": False}


def of_ppo(B: int, S: int) -> dict[str, Any]:
    values = {name: numbers(B, S) for name in ("advantages", "values", "old_values", "returns")}
    options = {"cliprange": 30.0, "max_log_ratio": 20.0, "loss_agg": "constant", "num_sequences_in_batch": 5}
    return {**values, "old_per_token_logps": numbers(B, S) - 3, **options}


def of_distill(B: int, S: int) -> dict[str, Any]:
    return {"teacher_input": numbers(B, S, 5), "teacher_linear_weight": numbers(37, 5), "ce_weight": 0.3}


def of_teachers(B: int, S: int) -> dict[str, Any]:
    return {
        "teacher_input": [numbers(B, S, 5), numbers(B, S, 3)],
        "teacher_linear_weight": [numbers(37, 5), numbers(37, 3)],
        "teacher_weight": numbers(B, S, 2).abs(),
        "teacher_temperature": [1.0, 2.0],
        "token_weights": numbers(B, S).abs(),
        "num_items_in_batch": 5.0,
        "ce_weight": 0.3,
    }


def of_topk(B: int, S: int) -> dict[str, Any]:
    top = numbers(B, S, 37).log_softmax(-1).topk(3)
    return {"teacher_ids": top.indices, "teacher_logprobs": top.values, "ce_weight": 0.3}


def of_both_kinds(B: int, S: int) -> dict[str, Any]:
    """Two teachers with hidden states, and one by its largest classes."""
    top = numbers(B, S, 37).log_softmax(-1).topk(3)
    classes = {"teacher_ids": [top.indices], "teacher_logprobs": [top.values]}
    return of_teachers(B, S) | classes | {"teacher_weight": numbers(B, S, 3).abs()}


def two_heads(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
    """Both heads share hidden states and targets."""
    return losses.multi_token([input, 2 * input], linear_weight, [target, target], **options)


def of_draft(B: int, S: int) -> dict[str, Any]:
    teacher = {"teacher_input": numbers(B, S, 5), "teacher_linear_weight": numbers(50, 5)}
    return {**teacher, "vocab_map": torch.arange(37) + 4, "token_weights": numbers(B, S).abs(), "position_decay": 0.8}


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[int, int], dict[str, Any]]]] = {
    "dpo": (losses.dpo, of_dpo),
    "dpo_types": (losses.dpo, of_dpo_types),
    "cpo": (losses.cpo, lambda B, S: {}),
    "simpo": (losses.simpo, lambda B, S: {}),
    "orpo": (losses.orpo, lambda B, S: {}),
    "kto": (losses.kto, lambda B, S: {"label": numbers(B) > 0, "ref_logps": numbers(B), "num_items_in_batch": 5.0}),
    "grpo": (losses.grpo, of_grpo),
    "gspo": (losses.grpo, of_gspo),
    "reinforce": (losses.reinforce, of_reinforce),
    "rloo": (losses.rloo, lambda B, S: {"advantages": numbers(B), "old_logps": numbers(B) - 18, "epsilon_high": 1e9}),
    "ppo": (losses.ppo, of_ppo),
    "sft": (losses.sft, lambda B, S: {"token_weights": numbers(B, S).abs(), "entropy_coef": 0.1}),
    "distill": (losses.distill, of_distill),
    "distill_teachers": (losses.distill, of_teachers),
    "distill_both_kinds": (losses.distill, of_both_kinds),
    "distill_topk": (losses.distill_topk, of_topk),
    "draft": (losses.draft, of_draft),
    "multi_token": (two_heads, lambda B, S: {"head_weights": [1.0, 0.3], "z_loss": 1e-2}),
    "dft": (losses.dft, lambda B, S: {}),
}


def given(name: str, lengths: list[int], device: torch.device) -> tuple[Inputs, dict[str, Any]]:
    inputs = batch(lengths, device)
    others = LOSSES[name][1](*inputs[2].shape)

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        return value.to(device) if isinstance(value, Tensor) else value

    return inputs, {key: moved(value) for key, value in others.items()}


def gradients(fn: Callable[..., Any], inputs: Inputs, others: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradients of the hidden states and of the projection."""
    x, weight = (tensor.detach().requires_grad_() for tensor in inputs[:2])
    loss, metrics = fn(x, weight, inputs[2], **others)
    assert loss.shape == () and loss.dtype == torch.float32  # noqa: PT018
    assert not any(value.requires_grad for value in metrics.values())
    assert all(value.shape == () for value in metrics.values())
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]
