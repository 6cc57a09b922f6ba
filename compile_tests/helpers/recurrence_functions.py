"""Linear recurrences token by token, as plain as they are written, and others that are nearly the same.

They have the parameters of transformers' functions over chunks, and compute in float32, or in float64 where that comes
in.
"""

from typing import Any

import torch
from torch import Tensor, nn


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _for_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


class DeltaRule:
    """The gated delta rule, with a decay for each head `[B, T, H]` or for each of its channels `[B, T, H, K]`."""

    eps = 1e-6

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = query.dtype
        query, key, value, g, beta = (x.to(_wide(query)) for x in (query, key, value, g, beta))
        query, key = (_for_heads(x, value.shape[2]) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            query, key = (x / (x.square().sum(-1, keepdim=True) + self.eps).sqrt() for x in (query, key))
        query, decay = query * self.scale(query), self.log_decay(g).exp().unsqueeze(-1)
        decay = decay if decay.dim() == 5 else decay.unsqueeze(-1)
        state = self.begin(initial_state, (key[:, 0].unsqueeze(-1) * value[:, 0].unsqueeze(-2)).mul(0))
        outputs = []
        for t in range(value.shape[1]):
            q, k = query[:, t].unsqueeze(-1), key[:, t].unsqueeze(-1)
            state = state * decay[:, t]
            update = beta[:, t].unsqueeze(-1) * (value[:, t] - (state * k).sum(-2))
            state = state + k * update.unsqueeze(-2)
            outputs.append((state * q).sum(-2))
        return torch.stack(outputs, 1).to(self.result(dtype)), self.end(state) if output_final_state else None

    def scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5

    def log_decay(self, g: Tensor) -> Tensor:
        return g

    def begin(self, initial_state: Tensor | None, zeros: Tensor) -> Tensor:
        return zeros if initial_state is None else initial_state.to(zeros.dtype)

    def end(self, state: Tensor) -> Tensor:
        return state

    def result(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class Unscaled(DeltaRule):
    def scale(self, query: Tensor) -> float:
        return 1.0


class WithoutDecay(DeltaRule):
    def log_decay(self, g: Tensor) -> Tensor:
        return 0 * g


class OtherEps(DeltaRule):
    eps = 1e-5


class BoundedDecay(DeltaRule):
    """Another one only where a token forgets nearly all."""

    def log_decay(self, g: Tensor) -> Tensor:
        return g.clamp(min=-20.0)


class WithoutGradientOfDecay(DeltaRule):
    def log_decay(self, g: Tensor) -> Tensor:
        return g.detach()


class ForgetsItsBeginning(DeltaRule):
    def begin(self, initial_state: Tensor | None, zeros: Tensor) -> Tensor:
        return zeros


class OtherState(DeltaRule):
    def end(self, state: Tensor) -> Tensor:
        return state.transpose(-1, -2).reshape(state.shape)


class OtherDtype(DeltaRule):
    def result(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.bfloat16 else dtype


class OnGpusAlone(DeltaRule):
    """The delta rule of GPUs alone, as flash-linear-attention's functions are."""

    def log_decay(self, g: Tensor) -> Tensor:
        if g.device.type == "cpu":
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return g


OTHER_DELTA_RULES: list[type[DeltaRule]] = [
    Unscaled,
    WithoutDecay,
    OtherEps,
    BoundedDecay,
    WithoutGradientOfDecay,
    ForgetsItsBeginning,
    OtherState,
    OtherDtype,
    OnGpusAlone,
]


class Scan:
    """The scan of Mamba-2."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        x, dt, B, C = (t.to(_wide(x)) for t in (x, dt, B, C))
        B, C = (_for_heads(t, x.shape[2]).unsqueeze(-2) for t in (B, C))
        dt = dt if dt_bias is None else dt + dt_bias
        dt = self.limited(nn.functional.softplus(dt) if dt_softplus else dt, dt_limit).unsqueeze(-1)
        decay, xdt = (dt * A.unsqueeze(-1)).exp().unsqueeze(-1), (x * dt).unsqueeze(-1)
        zeros = (xdt[:, 0] * B[:, 0]).mul(0)
        state = zeros if initial_states is None else initial_states.to(zeros.dtype)
        outputs = []
        for t in range(x.shape[1]):
            state = self.updated(state, decay[:, t], xdt[:, t] * B[:, t])
            outputs.append((state * C[:, t]).sum(-1))
        out = self.with_skip(torch.stack(outputs, 1), x, D)
        return (out, state) if return_final_states else out

    def limited(self, dt: Tensor, limit: tuple[float, float]) -> Tensor:
        return dt.clamp(*limit)

    def updated(self, state: Tensor, decay: Tensor, update: Tensor) -> Tensor:
        return state * decay + update

    def with_skip(self, out: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
        return out if D is None else out + D.unsqueeze(-1) * x


class Unlimited(Scan):
    def limited(self, dt: Tensor, limit: tuple[float, float]) -> Tensor:
        return dt.clamp(min=0.0)


class DecaysLater(Scan):
    def updated(self, state: Tensor, decay: Tensor, update: Tensor) -> Tensor:
        return (state + update) * decay


class WithoutSkip(Scan):
    def with_skip(self, out: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
        return out if D is None else out + 0 * D.unsqueeze(-1) * x


OTHER_SCANS: list[type[Scan]] = [Unlimited, DecaysLater, WithoutSkip]
