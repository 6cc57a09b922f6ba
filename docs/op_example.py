"""An example of an operator that can be pasted: its first sample's arguments made anew, with what each line printed."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import llmk
from llmk.registry import Op, Sample

OUTPUTS = {
    "add_rms_norm": ("y", "h"),
    "causal_conv1d": ("y", "final_state"),
    "causal_conv1d_step": ("y", "next_state"),
    "ce_tvd": ("ce", "tvd"),
    "fused_linear_ce_metrics": ("loss", "entropy", "correct"),
    "fused_linear_distill": ("loss", "divergences", "ce"),
    "fused_linear_jsd_ce": ("loss", "divergence", "ce"),
    "fused_linear_policy": ("loss", "logprobs", "entropy"),
    "fused_linear_preference": ("loss", "logprobs", "entropy"),
    "gated_delta_rule": ("y", "final_state"),
    "gated_delta_rule_step": ("y", "next_state"),
    "gated_linear_attention": ("y", "final_state"),
    "gated_linear_attention_step": ("y", "next_state"),
    "linear_logprobs": ("logprobs", "entropy"),
    "linear_topk": ("logprobs", "indices", "logsumexp"),
    "moe_permute": ("rows", "places", "ends"),
    "qk_norm_rope": ("q_rotated", "k_rotated"),
    "rope": ("q_rotated", "k_rotated"),
    "router_topk": ("weights", "experts"),
    "router_topk_sums": ("weights", "sums", "squares", "experts", "counts"),
}
"""The results of operators that have several; without an entry they are y0, y1 and so on."""


def example(op: Op) -> str:
    """The text of a script, run line by line, with what was printed behind the line that printed it."""
    torch.manual_seed(0)
    sample = next(iter(op.samples(torch.device("cpu"), op.dtypes[0])))
    lines = [
        "import torch",
        "",
        "import llmk",
        "",
        "torch.manual_seed(0)",
        *_inputs(op, sample),
        "",
        *_calls(op, sample),
    ]
    namespace: dict[str, Any] = {}
    return "\n".join(_run(line, namespace) for line in lines)


def _run(line: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(line, namespace)
    return line + (f"  # {printed.getvalue().strip()}" if printed.getvalue() else "")


def _inputs(op: Op, sample: Sample) -> Iterator[str]:
    for name, value in op.bind(sample).items():
        if isinstance(value, Tensor):
            made = _made(name, value)
            if name in op.differentiable:
                plain = made.startswith("torch.randn(") and made.count("(") == 1
                made = f"{made[:-1]}, requires_grad=True)" if plain else f"{made}.requires_grad_()"
            yield f"{name} = {made}"
        elif _are_tensors(value):
            yield f"{name} = [{', '.join(_made(name, each) for each in value)}]"


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(each, Tensor) for each in value)


def _made(name: str, value: Tensor) -> str:
    """An expression for such a tensor: classes, probabilities, decays, angles and boxes are what they should be."""
    shape = ", ".join(map(str, value.shape))
    if not value.is_floating_point():
        if name in ("target", "labels"):
            return f"torch.randint(0, {int(value.max()) + 1}, ({shape},))"
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"  # places, of which not any will do
    rows = value.double()
    if value.dim() > 1 and _is_one(rows.exp().sum(-1)):
        return f"torch.randn({shape}).log_softmax(-1)"
    if value.dim() > 1 and bool((rows >= 0).all()) and _is_one(rows.sum(-1)):
        return f"torch.randn({shape}).softmax(-1)"
    if name in ("cos", "sin"):
        return f"torch.randn({shape}).{name}()"
    if name in ("boxes", "targets"):
        return f"torch.rand({shape}).sort(-1).values"  # x1 < x2 and y1 < y2
    if value.numel() > 1 and bool((rows <= 0).all()):
        return f"torch.rand({shape}).neg()"
    if value.numel() > 1 and bool(((rows >= 0) & (rows <= 1)).all()):
        return f"torch.rand({shape})"
    return f"torch.randn({shape})"


def _is_one(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _calls(op: Op, sample: Sample) -> Iterator[str]:
    bound = op.bind(sample)
    written = {name: name if isinstance(v, Tensor) or _are_tensors(v) else repr(v) for name, v in bound.items()}
    arguments = ", ".join((f"{name}=" if name in sample.kwargs else "") + text for name, text in written.items())
    namespace = "llmk.functional" if hasattr(llmk.functional, op.name) else "torch.ops.llmk"
    count = len(op.schema.returns)
    outputs = ["y"] if count == 1 else OUTPUTS.get(op.name, [f"y{i}" for i in range(count)])
    yield f"{', '.join(outputs)} = {namespace}.{op.name}({arguments})"
    wanted = [name for name in op.differentiable if isinstance(bound.get(name), Tensor)]
    result = op.overload(**{name: v.detach().requires_grad_() if name in wanted else v for name, v in bound.items()})
    tensors = [result] if isinstance(result, Tensor) else result
    for name, tensor in zip(outputs, tensors, strict=True):
        yield f"print({name}.shape)" if tensor.dim() else f"print({name}.item())"
    if not wanted:
        return
    yield ""
    sums = [
        f"{name}.sum()" if tensor.dim() else name
        for name, tensor in zip(outputs, tensors, strict=True)
        if tensor.requires_grad
    ]
    yield f"{sums[0]}.backward()" if len(sums) == 1 else f"({' + '.join(sums)}).backward()"
    yield from (f"print({name}.grad.shape)" for name in wanted)
