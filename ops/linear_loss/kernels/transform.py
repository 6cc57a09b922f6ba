"""The transform of a row's logits before their softmax."""

from typing import NamedTuple

from torch import Tensor

from llmk.ops.common.math import cap_cpu, cap_slope_cpu


class Transform(NamedTuple):
    """The transform of logits before their softmax: y = outer * cap(inner * z), in float32."""

    inner: float = 1.0
    outer: float = 1.0
    softcap: float = 0.0
    rounded: bool = False  # logits are rounded to the dtype of the rows first

    @property
    def factor(self) -> float:
        """The part of dy / dz that is the same for all logits and is not in P."""
        return 1.0 if self.softcap else self.inner * self.outer

    @property
    def numbers(self) -> tuple[float | None, float | None, float | None]:
        """Inner, or without a cap the factor, outer, and the cap, for kernels: None for what they need not compute."""
        if self.softcap:
            return self.inner, self.outer, self.softcap
        return None if self.factor == 1.0 else self.factor, None, None

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return y and dy / dz of float32 logits, None where that is `factor`."""
        if not self.softcap:
            factor = self.inner * self.outer
            return (z if factor == 1.0 else z * factor), None
        u = z * self.inner
        return cap_cpu(u, self.softcap) * self.outer, cap_slope_cpu(u, self.softcap) * (self.inner * self.outer)
