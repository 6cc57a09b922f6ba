"""The layers that transformers' `use_kernels` puts into a model's slots.

The package `kernels` runs the `forward` of such a class on the model's own module, in place of the module's own: the
class has no state and no constructor, and its arguments are those of the layer that it stands for. Tensors that an
operator does not take (float64, a weight in another dtype than the input) go to the module's own `forward`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from llmk import functional
from llmk.ops.common.activations import GATES
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import FunctionForm
from llmk.transformers.convolutions import CausalConv1d, CausalConv1dStep
from llmk.transformers.recurrences import DeltaRule, DeltaRuleStep, Scan, WholeLayer

FUNCTIONS: dict[str, FunctionForm] = {
    "causal_conv1d_fn": CausalConv1d(),
    "causal_conv1d_update": CausalConv1dStep(),
    "chunk_gated_delta_rule": DeltaRule(),
    "chunk_kda": DeltaRule(grouped=False, channels=True),
    "fused_recurrent_gated_delta_rule": DeltaRuleStep(),
    "fused_recurrent_kda": DeltaRuleStep(grouped=False, channels=True),
    "mamba_chunk_scan_combined": Scan(),
    # Mamba-2's layer in training, from its input's projection on. What is here goes on to the slots above and computes
    # nothing: a function of this slot has no mask, and padding on the left would enter the states.
    "mamba_split_conv1d_scan_combined": WholeLayer(),
}
"""The slots of functions that `patch` knows too, which try what is in a slot."""


class Layer(nn.Module):
    """What stands in a slot: it serves training and `torch.compile`."""

    can_torch_compile = True
    has_backward = True


def _alike(*tensors: Tensor) -> bool:
    """Return True if they are of one dtype, and one that the operators take."""
    return tensors[0].dtype in FLOAT_DTYPES and all(t.dtype == tensors[0].dtype for t in tensors)


def _norm(eps: str, offset: float) -> Callable[..., Any]:
    """Make the forward of a norm with this offset to its weight, which reads its eps from an attribute."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not _alike(hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        return functional.rms_norm(hidden_states, self.weight, getattr(self, eps), offset=offset)

    return forward


class RMSNormGated(Layer):
    """Qwen3-Next's norm before a gate: `weight [H]`, `variance_epsilon`, `activation`."""

    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        alike = _alike(hidden_states, gate, self.weight) and hidden_states.shape == gate.shape
        if not alike or self.activation not in GATES:
            return type(self).forward(self, hidden_states, gate)
        return functional.rms_norm_gated(
            hidden_states, gate, self.weight, self.variance_epsilon, activation=self.activation
        )


class SoftmaxTopKRouter(Layer):
    """Qwen3.5-MoE's router: `weight [E, H]`, `top_k`, `hidden_dim`. The weights of a token's experts have sum 1."""

    weight: Tensor
    top_k: int
    hidden_dim: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not _alike(hidden_states, self.weight):
            return type(self).forward(self, hidden_states)
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, experts = functional.router_topk(logits, self.top_k)
        return logits, weights.to(logits.dtype), experts


def _layer_of(form: FunctionForm) -> type[Layer]:
    """Make the layer of a function's slot, whose signature `kernels` compares with that of the slot's own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = form.call(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs) if result is NotImplemented else result

    forward.__signature__ = inspect.signature(type(form).call)  # type: ignore[attr-defined]
    return _layer(type(form).__name__, type(form).__doc__ or "", forward)


def _mlp(unit: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Make the forward of a feed-forward layer with this gated unit."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(unit(gate, up) if _alike(gate, up) else self.act_fn(gate) * up)

    return forward


def _layer(name: str, what: str, forward: Callable[..., Any]) -> type[Layer]:
    return type(name, (Layer,), {"forward": forward, "__doc__": what})


class RotaryPosEmb(Layer):
    """Llama's `apply_rotary_pos_emb`: q `[B, HQ, S, D]`, k `[B, HK, S, D]`, cos and sin `[1 or B, S, D]`."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        whole = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if unsqueeze_dim != 1 or not whole or not _alike(q, k, cos, sin):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return functional.rope(q, k, cos, sin)


class ForCausalLMLoss(Layer):
    """transformers' `ForCausalLMLoss`: logits `[B, S, vocab_size]`, labels `[B, S]`; the loss is float32."""

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not _alike(logits):
            return type(self).forward(
                self, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if shift_labels is None:  # token i is held against label i + 1
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(
            logits.view(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


MLP = "`gate_proj`, `up_proj`, `down_proj`, `act_fn`"
FORWARDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "RMSNorm": ("Llama's norm: `weight [H]`, `variance_epsilon`.", _norm("variance_epsilon", offset=0.0)),
    "RMSNormZeroCentered": ("Qwen3.5's norm, of `1 + weight`: `weight [H]`, `eps`.", _norm("eps", offset=1.0)),
    "SwiGLUMLP": (f"Llama's feed-forward layer: {MLP}.", _mlp(functional.swiglu)),
    "GeGLUMLP": (f"Gemma's feed-forward layer, with the tanh form of GELU: {MLP}.", _mlp(functional.geglu)),
}
LAYERS: dict[str, type[nn.Module]] = {
    **{slot: _layer(slot, *given) for slot, given in FORWARDS.items()},
    "RMSNormGated": RMSNormGated,
    "SoftmaxTopKRouter": SoftmaxTopKRouter,
    **{slot: _layer_of(form) for slot, form in FUNCTIONS.items()},
    "rotary_pos_emb": RotaryPosEmb,
    "ForCausalLMLoss": ForCausalLMLoss,
}
"""The layers by transformers' name of the slot."""
