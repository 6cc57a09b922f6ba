"""An operator of a C++ extension, as PyTorch's manual builds one; importing this takes the compiler some 20 seconds."""

import torch
from torch import Tensor
from torch.utils.cpp_extension import load_inline

from compile_tests.helpers.strangers import record

SOURCE = """
#include <ATen/ops/where.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/gt.h>
#include <torch/library.h>

at::Tensor leaky(const at::Tensor& x, double slope) {
  TORCH_CHECK(x.is_floating_point(), "x: expected floating point, got ", x.scalar_type());
  return at::where(x.gt(0), x, x.mul(slope)).contiguous();
}

TORCH_LIBRARY(strangers_cpp, m) { m.def("leaky(Tensor x, float slope=0.01) -> Tensor"); }
TORCH_LIBRARY_IMPL(strangers_cpp, CPU, m) { m.impl("leaky", &leaky); }
"""

load_inline("strangers_cpp", SOURCE, is_python_module=False, no_implicit_headers=True, extra_cflags=["-O0"])


@torch.library.register_fake("strangers_cpp::leaky")
def _(x: Tensor, slope: float = 0.01) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def setup_context(ctx, inputs, output):
    x, ctx.slope = inputs
    ctx.save_for_backward(x)


def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.where(x > 0, grad, grad * ctx.slope), None


torch.library.register_autograd("strangers_cpp::leaky", backward, setup_context=setup_context)


def reference_leaky(x, slope=0.01):
    return torch.nn.functional.leaky_relu(x, slope)


LEAKY = record(torch.ops.strangers_cpp.leaky, reference_leaky, differentiable=("x",))
