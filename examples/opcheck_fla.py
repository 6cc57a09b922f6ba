"""Check flash-linear-attention's losses and norms: python -m llmk.opcheck examples/opcheck_fla.py --path interpreter"""

# pyright: reportMissingImports=false
import torch
import torch.nn.functional as F
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
from fla.modules.layernorm_gated import rmsnorm_fn

from llmk.registry import Op, Sample


def logits(device, dtype):
    for rows, classes, why in ((3, 37, "odd width"), (4, 16, "powers of two"), (1, 5, "one row")):
        target = torch.randint(classes, (rows,), device=device)
        target[0] = -100
        for options in ({}, {"label_smoothing": 0.1}, {"logit_scale": 0.5}):
            yield Sample((torch.randn(rows, classes, device=device, dtype=dtype), target), options, why=why)


def cross_entropy(logits, target, label_smoothing=0.0, logit_scale=1.0):
    loss = F.cross_entropy(logits * logit_scale, target, reduction="none", label_smoothing=label_smoothing)
    return loss, torch.zeros_like(loss)


def gated(device, dtype):
    for shape, why in (((3, 37), "odd width"), ((4, 2, 16), "three axes"), ((1, 1), "one element")):
        x, z, w = (torch.randn(s, device=device, dtype=dtype) for s in (shape, shape, shape[-1:]))
        yield Sample((x, w, None, z), why=why)


def rms_norm(x, weight, bias, z):
    return F.rms_norm(x, weight.shape, weight, 1e-6) * F.silu(z)


OPTIONS = {"name": "fla_cross_entropy", "overload": cross_entropy_loss, "reference": cross_entropy}
CROSS_ENTROPY = Op(**OPTIONS, samples=logits, differentiable=("logits",))
OPTIONS = {"name": "fla_rms_norm", "overload": rmsnorm_fn, "reference": rms_norm}
RMS_NORM = Op(**OPTIONS, samples=gated, differentiable=("x", "weight", "z"))
