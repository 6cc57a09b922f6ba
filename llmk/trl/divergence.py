"""The one function through which TRL's DistillationTrainer computes its loss, by operators of llmk."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmk.trl.counts import Counted

IGNORED = -100


class Divergence(Counted):
    """Stands where TRL calls `_chunked_divergence_loss`."""

    what = "the divergence by fused_linear_jsd"

    def __call__(
        self,
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Tensor | int | None = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the sum of the student's entropies, without gradients, and the number of tokens.

        Args:
            student_hidden_states: `[B, S, H]`.
            teacher_hidden_states: `[B, S, H']`.
            student_lm_head_weight: `[V, H]`.
            teacher_lm_head_weight: `[V, H']`.
            completion_mask: `[B, S]`, 0 where a token does not count.
            num_items_in_batch: Denominator of the sum over tokens; the tokens that count if None.
        """
        student = _whole(student_hidden_states, student_lm_head_weight, student_lm_head_bias)
        bias = None if teacher_lm_head_bias is None else teacher_lm_head_bias.detach()
        teacher = _whole(teacher_hidden_states.detach(), teacher_lm_head_weight.detach(), bias)
        self.count(*student)
        labels = torch.where(completion_mask != 0, 0, IGNORED)
        student_x, student_weight, student_bias = _scaled(student, student_logit_scale)
        teacher_x, teacher_weight, teacher_bias = _scaled(teacher, teacher_logit_scale)
        softcap = student_final_logit_softcapping or 0.0
        mean = torch.ops.llmk.fused_linear_jsd(
            student_x,
            student_weight,
            teacher_x,
            teacher_weight,
            labels=labels,
            linear_bias=student_bias,
            teacher_linear_bias=teacher_bias,
            beta=beta,
            temperature=temperature,
            softcap=softcap,
            teacher_softcap=teacher_final_logit_softcapping or 0.0,
            ignore_index=IGNORED,
        )
        with torch.no_grad():
            _, entropy = torch.ops.llmk.linear_logprobs(
                student_x,
                student_weight,
                labels,
                linear_bias=student_bias,
                temperature=temperature,
                softcap=softcap,
                ignore_index=IGNORED,
            )
        count = (labels != IGNORED).sum()
        share = 1.0 if num_items_in_batch is None else count / num_items_in_batch
        return torch.where(count > 0, share * mean, 0.0), entropy.sum(), count


def _whole(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather a projection that is sharded over ranks once, and cast it under autocast to what hidden states are in."""
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _scaled(layer: tuple[Tensor, Tensor, Tensor | None], scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a linear layer whose logits are scaled."""
    hidden, weight, bias = layer
    if scale == 1.0:
        return layer
    return hidden * scale, weight, None if bias is None else bias * scale
