"""The norm of diffusion transformers, whose scale and shift come from what a sample is conditioned on."""

from torch import Tensor, addcmul

from llmk.nn.norms import RMSNorm


class ModulatedRMSNorm(RMSNorm):
    r"""`RMSNorm` with a scale and a shift of each sample or token: `rms_norm(x) * (1 + scale) + shift`.

    `llmk.functional.rms_norm` and PyTorch around it, which a compiler fuses with the norm. A norm without parameters of
    its own has `elementwise_affine=False`.

    Call it with `input [..., *normalized_shape]`, `scale`, and `shift` or None. Of an input `[B, ..., H]` they are
    `[H]`, the same everywhere; `[B, H]`, one for each sample; or of as many axes as the input, each the input's or 1.
    The result has the shape and dtype of the input.

    Parameters: `weight [*normalized_shape]`.

    Source: Peebles and Xie, 2022, https://arxiv.org/abs/2212.09748, whose adaLN modulates a layer norm.
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        normed = super().forward(input)
        factor = 1 + self._of_input("scale", scale, input)
        if shift is None:
            return (normed * factor).to(input.dtype)
        return addcmul(self._of_input("shift", shift, input), normed, factor).to(input.dtype)

    def _of_input(self, name: str, tensor: Tensor, input: Tensor) -> Tensor:
        """The tensor in a shape that is broadcast to the input's."""
        own = len(self.normalized_shape)
        leading = tuple(tensor.shape[:-own])
        if tensor.dim() == own + 1 and leading == input.shape[:1]:
            tensor = tensor.view(*leading, *[1] * (input.dim() - own - 1), *tensor.shape[1:])
        fits = tensor.dim() in (own, input.dim()) and all(
            size in (1, whole) for size, whole in zip(tensor.shape[:-own], input.shape, strict=False)
        )
        if not fits or tensor.shape[-own:] != input.shape[-own:]:
            expected = ", ".join(map(str, self.normalized_shape))
            raise ValueError(
                f"{name}: expected shape [{expected}], [{input.shape[0]}, {expected}] or one that fits input "
                f"{tuple(input.shape)}, got {tuple(tensor.shape)}"
            )
        return tensor
