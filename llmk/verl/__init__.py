"""llmk in verl: `patch()` puts `linear_logprobs` where verl's fused head is.

In verl's configuration it is one line beside its fused kernels, as verl imports `external_lib` in every process:

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.external_lib=llmk.verl.patched

Needs the package `verl`, 0.9; nothing else in llmk does.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

HEAD = "verl.utils.experimental.torch_functional"
ARGUMENTS = ["self", "hidden_states", "vocab_weights", "input_ids", "temperature"]

__all__ = ["patch", "unpatch"]


def patch() -> None:
    """Let verl's `FusedLinearForPPO` compute by `linear_logprobs`, in this process; a second call is a no-op.

    verl's models call it under `use_fused_kernels` where `fused_kernel_options.impl_backend` is "torch" or "liger". The
    log-probabilities are float32, as verl's are, and so is the entropy, which verl rounds to the dtype of the hidden
    states. Both are differentiable.

    Raises:
        ModuleNotFoundError: verl is not installed.
        TypeError: `FusedLinearForPPO` takes other arguments than verl 0.9's.
    """
    head = _head()
    if "llmk_original" in vars(head):
        return
    found = list(inspect.signature(head.forward).parameters)
    if found != ARGUMENTS:
        raise TypeError(f"verl: expected FusedLinearForPPO.forward({', '.join(ARGUMENTS)}), as in 0.9, got {found}")
    head.llmk_original = head.forward
    head.forward = _forward


def unpatch() -> None:
    """Undo it: verl's head is its own again."""
    head = _head()
    if "llmk_original" in vars(head):
        head.forward = head.llmk_original
        del head.llmk_original


def _head() -> Any:
    return importlib.import_module(HEAD).FusedLinearForPPO


def _forward(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Stands where verl's `FusedLinearForPPO.forward` was; tokens whose id is -100 do not count.

    Args:
        hidden_states: `[T, H]` or `[B, S, H]`.
        vocab_weights: `[V, H]`.
        input_ids: `[T]` or `[B, S]`, the tokens whose log-probabilities are wanted.
    """
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
    return torch.ops.llmk.linear_logprobs(
        hidden_states.to(dtype), vocab_weights.to(dtype), input_ids, temperature=temperature
    )
