"""The short causal convolution before a recurrence."""

import math

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.convolution.causal_conv1d import MOST_TAPS
from llmk.registry import check_option, check_size


class CausalConv1d(nn.Module):
    """The short convolution of linear attention and Mamba-2: each channel by its own filter, over the past alone.

    As transformers' hybrids use `nn.Conv1d(hidden_size, hidden_size, kernel_size, groups=hidden_size,
    padding=kernel_size - 1)`: its output up to the last token, and then the activation. A call takes `[B, D, T]` and
    returns the output and, for the next chunk of a long sequence, the final state, see `llmk.functional.causal_conv1d`.
    Over `context_group`, a process group's name, ranks have consecutive parts of the sequences.

    Parameters: `weight [hidden_size, 1, kernel_size]`, `bias [hidden_size]`.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        context_group: str = "",
    ) -> None:
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_size("kernel_size", kernel_size, 2, MOST_TAPS)
        if activation is not None:
            check_option("activation", activation, ("silu", "swish"))
        self.hidden_size, self.kernel_size, self.activation = hidden_size, kernel_size, activation
        self.context_group = context_group
        self.weight = nn.Parameter(torch.empty((hidden_size, 1, kernel_size), device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty((hidden_size,), device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.kernel_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, input: Tensor, sequence_ids: Tensor | None = None, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return functional.causal_conv1d(
            input,
            self.weight.squeeze(1),
            self.bias,
            activation=self.activation,
            sequence_ids=sequence_ids,
            initial_state=initial_state,
            context_group=self.context_group,
        )

    def extra_repr(self) -> str:
        bias, activation = self.bias is not None, self.activation
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={bias}, activation={activation!r}"
