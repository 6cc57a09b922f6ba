"""Losses as modules: an operator's options are given once, its tensors with every call."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.linear_loss.chunked import VocabSlice
from llmk.ops.linear_loss.drivers.contrastive import REDUCTIONS as CONTRASTIVE_REDUCTIONS
from llmk.ops.linear_loss.drivers.logprobs import check_k
from llmk.ops.linear_loss.head import check_chunk_size
from llmk.ops.loss.cross_entropy_options import check_loss_numbers
from llmk.ops.loss.giou_loss import check_giou_options
from llmk.ops.loss.kl_div import REDUCTIONS
from llmk.registry import OPS, check_finite, check_flag, check_number, check_option, check_positive, check_switch
from llmk.registry.private.operators import schema_of


class _OperatorLoss(nn.Module):
    """An operator whose options, the arguments of its schema that are no tensors, are attributes of their names.

    Which classes a projection has is no option: here it has all, or is a DTensor.
    """

    _operator: ClassVar[Callable[..., Any]]
    _options: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, operator: str | None = None) -> None:
        super().__init_subclass__()
        if operator is not None:
            arguments = schema_of(OPS[operator].overload).arguments
            cls._operator = staticmethod(getattr(functional, operator))
            names = [argument.name for argument in arguments if "Tensor" not in str(argument.type)]
            cls._options = tuple(name for name in names if name not in VocabSlice.__annotations__)

    def _call(self, *args: Tensor | None, **tensors: Tensor | None) -> Any:
        return self._operator(*args, **tensors, **{name: getattr(self, name) for name in self._options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._options)


class CrossEntropyLoss(_OperatorLoss, operator="cross_entropy"):
    """`torch.nn.CrossEntropyLoss` over the last axis, with softcap and z-loss."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        _check_class_weights(weight)
        check_loss_numbers(reduction, label_smoothing, z_loss)
        check_switch("softcap", softcap)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.softcap, self.z_loss = softcap, z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self._call(input, target, weight=self.weight)


def _check_class_weights(weight: object) -> None:
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(
            f"weight: expected None or a tensor [V], a weight for each class, got {type(weight).__name__}; a "
            "projection is an argument of the call, loss(hidden, lm_head.weight, target)"
        )


class LinearCrossEntropyLoss(CrossEntropyLoss, operator="fused_linear_ce"):
    """The output projection and its loss in one, so that the logits never exist whole.

    Give it the projection's weight, which may be tied to an embedding: `loss(hidden, lm_head.weight, target)`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int = 0,
        skip_ignored: bool = True,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, label_smoothing, softcap=softcap, z_loss=z_loss)
        check_chunk_size("chunk_size", chunk_size)
        self.chunk_size, self.skip_ignored, self.logits_dtype = chunk_size, skip_ignored, logits_dtype

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        return self._call(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight, row_weight=row_weight
        )


class KLDivLoss(_OperatorLoss, operator="kl_div"):
    """`torch.nn.KLDivLoss`: of log-probabilities `input` against probabilities `target`, or their logarithms."""

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__()
        check_option("reduction", reduction, REDUCTIONS)
        self.reduction, self.log_target = reduction, log_target

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self._call(input, target)


class GIoULoss(_OperatorLoss, operator="giou_loss"):
    """Generalized intersection over union of boxes `[..., 4]`, as in `torchvision.ops.generalized_box_iou_loss`.

    A target whose last coordinate is at most 0 is padding and does not count.
    """

    def __init__(self, reduction: str = "mean", eps: float = 1e-5) -> None:
        super().__init__()
        check_giou_options(reduction, eps)
        self.reduction, self.eps = reduction, eps

    def forward(self, boxes: Tensor, targets: Tensor) -> Tensor:
        return self._call(boxes, targets)


class LinearLogProbs(_OperatorLoss, operator="linear_logprobs"):
    """Log-probability of the target and entropy of each token, from hidden states and a projection's weight.

    `logprobs, entropy = module(hidden, lm_head.weight, target)`; see `llmk.functional.linear_logprobs`.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        ignore_index: int = -100,
        skip_ignored: bool = True,
        chunk_size: int = 0,
        logits_dtype: torch.dtype | None = None,
        add_tail: bool = False,
        entropy: bool = True,
    ) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        check_finite("logit_scale", logit_scale)
        check_switch("softcap", softcap)
        check_chunk_size("chunk_size", chunk_size)
        check_flag("add_tail", add_tail)
        check_flag("entropy", entropy)
        self.temperature, self.logit_scale, self.softcap = temperature, logit_scale, softcap
        self.ignore_index, self.skip_ignored, self.chunk_size = ignore_index, skip_ignored, chunk_size
        self.logits_dtype, self.add_tail, self.entropy = logits_dtype, add_tail, entropy

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        support: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._call(input, linear_weight, target, linear_bias=linear_bias, support=support)


class LinearTopK(_OperatorLoss, operator="linear_topk"):
    """The k largest log-probabilities of each token, their classes and the logsumexp, from hidden states.

    `logprobs, indices, logsumexp = module(hidden, lm_head.weight)`; see `llmk.functional.linear_topk`.
    """

    def __init__(
        self,
        k: int,
        temperature: float = 1.0,
        *,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        check_k(k)
        check_positive("temperature", temperature)
        check_finite("logit_scale", logit_scale)
        check_switch("softcap", softcap)
        check_chunk_size("chunk_size", chunk_size)
        self.k, self.temperature, self.logit_scale, self.softcap = k, temperature, logit_scale, softcap
        self.chunk_size = chunk_size

    def forward(
        self, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._call(input, linear_weight, linear_bias=linear_bias)


class InfoNCELoss(_OperatorLoss, operator="info_nce"):
    """The contrastive loss of queries and their keys, in one direction or both, without all similarities at a time.

    `loss(query, key, negatives, scale=logit_scale.exp())`; see `llmk.functional.info_nce`.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        symmetric: bool = False,
        reduction: str = "mean",
        *,
        chunk_size: int = 0,
        group_name: str = "",
    ) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        check_option("reduction", reduction, CONTRASTIVE_REDUCTIONS)
        check_chunk_size("chunk_size", chunk_size)
        self.temperature, self.symmetric, self.reduction = temperature, symmetric, reduction
        self.chunk_size, self.group_name = chunk_size, group_name

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
    ) -> Tensor:
        return self._call(
            query,
            key,
            negatives,
            scale=scale,
            query_ids=query_ids,
            key_ids=key_ids,
            negative_ids=negative_ids,
        )


class JSDLoss(_OperatorLoss, operator="jsd"):
    """Generalized Jensen-Shannon divergence of log-probabilities; see `llmk.functional.jsd`."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        check_number("beta", beta, 0.0, 1.0, "a number from 0 to 1")
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        return self._call(input, target, labels=labels)


class LinearJSDLoss(_OperatorLoss, operator="fused_linear_jsd"):
    """`JSDLoss` from the hidden states and projections of student and teacher; see `llmk.functional.fused_linear_jsd`.

    `loss(hidden, lm_head.weight, teacher_hidden, teacher_head.weight, labels)`: nothing of the teacher may require a
    gradient.
    """

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        *,
        softcap: float = 0.0,
        teacher_softcap: float = 0.0,
        ignore_index: int = -100,
        skip_ignored: bool = False,
        chunk_size: int = 0,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_number("beta", beta, 0.0, 1.0, "a number from 0 to 1")
        check_positive("temperature", temperature)
        check_switch("softcap", softcap)
        check_switch("teacher_softcap", teacher_softcap)
        check_chunk_size("chunk_size", chunk_size)
        self.beta, self.temperature, self.softcap, self.teacher_softcap = beta, temperature, softcap, teacher_softcap
        self.ignore_index, self.skip_ignored, self.chunk_size = ignore_index, skip_ignored, chunk_size
        self.logits_dtype = logits_dtype

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        teacher_input: Tensor,
        teacher_linear_weight: Tensor,
        labels: Tensor | None = None,
        linear_bias: Tensor | None = None,
        teacher_linear_bias: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        return self._call(
            input,
            linear_weight,
            teacher_input,
            teacher_linear_weight,
            labels=labels,
            linear_bias=linear_bias,
            teacher_linear_bias=teacher_linear_bias,
            row_weight=row_weight,
        )


class CrossEntropyTVDLoss(nn.Module):
    """The mean over tokens that count of `ce_weight * cross entropy + tvd_weight * total variation distance`.

    `loss(logits, teacher_logits, target)`; see `llmk.functional.ce_tvd`, which gives both of each token. float32.
    """

    def __init__(self, ce_weight: float = 1.0, tvd_weight: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__()
        check_finite("ce_weight", ce_weight)
        check_finite("tvd_weight", tvd_weight)
        self.ce_weight, self.tvd_weight, self.ignore_index = ce_weight, tvd_weight, ignore_index

    def forward(self, input: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        ce, tvd = functional.ce_tvd(input, teacher, target, ignore_index=self.ignore_index)
        count = (target.long() != self.ignore_index).sum()
        return (self.ce_weight * ce + self.tvd_weight * tvd).sum() / count

    def extra_repr(self) -> str:
        return f"ce_weight={self.ce_weight}, tvd_weight={self.tvd_weight}, ignore_index={self.ignore_index}"


class TVDLoss(_OperatorLoss, operator="tvd"):
    """Total variation distance of probabilities; see `llmk.functional.tvd`."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100) -> None:
        super().__init__()
        check_option("reduction", reduction, ("none", "mean", "sum"))
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, input: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        return self._call(input, target, labels=labels)
