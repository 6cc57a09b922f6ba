"""A program whose constant comes from the command line: it writes what it computes through the backend."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import llmk.compiler  # noqa: F401 offers the backend
from compile_tests.helpers.without_cpp import WITHOUT_CPP

if __name__ == "__main__":
    scale, os.environ["TORCHINDUCTOR_CACHE_DIR"] = float(sys.argv[1]), sys.argv[2]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.rms_norm(x, (4,), w, 1e-6) * torch.tensor([scale, 2.0, 3.0, 4.0])
        y[:, 3] = scale
        return y

    x, w = torch.ones(2, 4), torch.ones(4, requires_grad=True)
    y = torch.compile(fn, backend="llmk", options=WITHOUT_CPP)(x, w)
    y.sum().backward()
    counted = counters["aot_autograd"]
    row, hits, misses = y[0].tolist(), counted["autograd_cache_hit"], counted["autograd_cache_miss"]
    sys.stdout.write(f"{[round(x, 4) for x in row]} {hits} {misses}\n")
