"""`python -m benchmarks.float32_logits`: what float32 logits cost, and what they are right by.

The time of losses that are fused with a projection, forward and backward, with float32 logits and with those of the
inputs' dtype, beside the matrix products alone: all ways in one process and in turns, each back to back for a while,
because under sustained matrix work a chip runs below the rate of a burst. Memory is the peak above the inputs. Then the
errors against float64: of log-probabilities, and of the divergence's gradient where the student is near its teacher.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.products import PRODUCTS
from benchmarks.report import header
from llmk.bench.timing import Timer
from llmk.ops.linear_loss.chunked.plan import kept_rows
from llmk.registry import OPS

DTYPE = torch.bfloat16
Call = Callable[[], Any]
TOKENS = [(8192, 2048, 151936), (8192, 3072, 128256), (8192, 4096, 128256), (12000, 3072, 200064)]
SMALL = [(64, 16, 96)]
KEPT = [(2048, 4096, 128256), (4096, 3584, 152064), (8192, 3584, 152064), (20000, 1536, 151936)]
"""Log-probabilities whose exponentials are kept, and two whose are not, beside compiled PyTorch's."""
SMALL_KEPT = [(16, 16, 96), (32, 16, 96)]
IGNORED = 0.6
"""The part of the tokens that does not count where those are skipped."""
ROUNDS = 2


class Tensors:
    """Makes tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=self.device, dtype=torch.float32)).to(DTYPE)

    def head(self, N: int, H: int, V: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, a projection's weight and targets."""
        x, weight = self.randn(N, H), self.randn(V, H, scale=scale / H**0.5)
        return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (N,), device=self.device)


def training(name: str, args: Sequence[Tensor], *, function: Callable[..., Any] | None = None, **kwargs: Any) -> Call:
    """Return a call of the forward and backward pass of an operator, or of a function; its first result is summed."""
    function = function or OPS[name].overload

    def call() -> None:
        result = function(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        for tensor in args:
            tensor.grad = None  # what is above the inputs is measured from here

    return call


def both(name: str, args: Sequence[Tensor], **kwargs: Any) -> dict[str, Call]:
    return {
        "float32": training(name, args, **kwargs),
        "input's dtype": training(name, args, **kwargs, logits_dtype=DTYPE),
    }


def workloads(make: Tensors, shapes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in shapes:
        x, weight, target = make.head(*shape)
        size = "x".join(map(str, shape))
        for name in ("fused_linear_ce", "linear_logprobs"):
            _, products = PRODUCTS[name](x, weight, target)
            yield f"{name} {size}", {"products alone": products, **both(name, (x, weight, target))}
    N, H, V = shapes[-1]
    x, weight, target = make.head(N, H, V)
    counts = torch.rand(N, device=make.device) >= IGNORED
    for words, labels in (("60% ignored", target.masked_fill(~counts, -100)), ("none ignored", target)):
        yield f"fused_linear_ce, skip_ignored, {words}", both("fused_linear_ce", (x, weight, labels), skip_ignored=True)
    x, weight, _ = make.head(N // 2, H, V)
    teacher, teacher_weight, _ = make.head(N // 2, 2 * H, V)
    args = x, weight, teacher.detach(), teacher_weight.detach()
    _, products = PRODUCTS["fused_linear_jsd"](*args)
    yield f"fused_linear_jsd {N // 2}x{H}x{V}", {"products alone": products, **both("fused_linear_jsd", args)}


def kept_workloads(make: Tensors, shapes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in shapes:
        x, weight, target = make.head(*shape)
        _, three = PRODUCTS["fused_linear_ce"](x, weight, target)
        _, four = PRODUCTS["linear_logprobs"](x, weight, target)
        composition = torch.compile(OPS["linear_logprobs"].reference, dynamic=False)
        kept = kept_rows(x.shape[0], weight.shape[0], x.element_size())
        yield (
            f"linear_logprobs {'x'.join(map(str, shape))}, {kept} tokens kept",
            {
                "three products": three,
                "four products": four,
                "float32": training("linear_logprobs", (x, weight, target)),
                "compiled PyTorch": training("linear_logprobs", (x, weight, target), function=composition),
            },
        )


def measure(timer: Timer, calls: dict[str, Call], seconds: float) -> dict[str, dict[str, float | None]]:
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        call()
    memory = {way: timer.peak_mib(call) for way, call in calls.items()}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            times[way].append(timer.sustained(call, seconds / ROUNDS))
    return {way: {"ms": statistics.mean(times[way]), "mib": memory[way]} for way in calls}


def errors(make: Tensors, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Yield the errors of log-probabilities in nats, and relative ones of gradients by the teacher's distance."""
    x, weight, target = (tensor.detach() for tensor in make.head(*shape, scale=5.0))
    for dtype in (None, DTYPE):
        logprobs, _ = OPS["linear_logprobs"].overload(x, weight, target, logits_dtype=dtype)
        found = [_error(logprobs[i : i + 64], x[i : i + 64], weight, target[i : i + 64]) for i in range(0, len(x), 64)]
        error = torch.cat(found)
        yield {"of": "log-probabilities", "logits": str(dtype), "mean": error.mean().item(), "max": error.max().item()}
    N, H, V = (size // 4 for size in shape)
    for distance in (1e-1, 1e-2, 1e-3):
        x, weight, _ = (tensor.detach() for tensor in make.head(N, H, V, scale=2.0))
        teacher = (weight.float() * (1 + distance * torch.randn_like(weight, dtype=torch.float32))).to(DTYPE)
        exact = x.double().requires_grad_()
        OPS["fused_linear_jsd"].reference(exact, weight.double(), x.double(), teacher.double()).backward()
        assert exact.grad is not None
        for dtype in (None, DTYPE):
            student = x.clone().requires_grad_()
            OPS["fused_linear_jsd"].overload(student, weight, x, teacher, logits_dtype=dtype).backward()
            assert student.grad is not None
            relative = (student.grad.double() - exact.grad).norm() / exact.grad.norm()
            yield {"of": f"dx, teacher at {distance:g}", "logits": str(dtype), "relative": relative.item()}


def _error(logprobs: Tensor, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    exact = (x.double() @ weight.double().t()).log_softmax(-1)
    return (logprobs - exact.gather(-1, target.unsqueeze(-1)).squeeze(-1)).abs()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float32_logits", description="Time float32 logits.")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer, make, rows = Timer(device, repeats=1), Tensors(device), []
    torch.manual_seed(0)
    wrong = list(errors(make, (2048, 2048, 151936) if timer.on_gpu else (64, 64, 512)))
    for row in wrong:
        print(row)
    kept = kept_workloads(make, KEPT if timer.on_gpu else SMALL_KEPT)
    for name, calls in itertools.chain(workloads(make, TOKENS if timer.on_gpu else SMALL), kept):
        ways = measure(timer, calls, 1.0 if timer.on_gpu else 0.01)
        rows.append({"workload": name, "ways": ways})
        print(f"{name}: " + ", ".join(f"{way} {found['ms']:.2f} ms {found['mib']} MiB" for way, found in ways.items()))
    if options.json:
        about = header(device, DTYPE, {}, {})
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "errors": wrong, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
