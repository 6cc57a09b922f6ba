"""The first call of each operator and module in a process, under each of many conditions, and the plain call after it.

Run by `test_first_calls.py`: a fresh process imports llmk and is forked for each action. It prints a digest of what
each plain call gave, outputs and gradients, which must not depend on what came before.
"""

import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import llmk
from llmk.accuracy.neighbours import copy_with_layout
from llmk.opcheck.calls import call
from llmk.opcheck.inputs import as_list, differentiable_inputs, prepare
from llmk.registry import OPS, Op, Sample

Call = Callable[[], list[Tensor]]
"""Calls an operator or a module on fresh inputs that want gradients; gives its outputs."""


def backward(outputs: list[Tensor]) -> None:
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])


def checkpointed(fn: Call, **options: Any) -> None:
    backward(as_list(checkpoint(lambda *_: tuple(fn()), torch.ones(1, requires_grad=True), **options)))


def in_fake_mode(fn: Call) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fn()


def under(mode: Callable[[], Any], fn: Call) -> None:
    with mode():
        fn()


def compiled(fn: Call) -> None:
    torch.compiler.reset()
    torch.compile(fn, backend="eager")()


def in_bfloat16(fn: Call) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        backward(fn())


def in_thread(fn: Call) -> None:
    thread = threading.Thread(target=lambda: backward(fn()))
    thread.start()
    thread.join()


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


ACTIONS: dict[str, Callable[[Call], Any]] = {
    "plain": lambda fn: None,
    "no_grad": lambda fn: under(torch.no_grad, fn),
    "inference_mode": lambda fn: under(torch.inference_mode, fn),
    "autocast": in_bfloat16,
    "checkpointed": lambda fn: checkpointed(fn, use_reentrant=False),
    "reentrant": lambda fn: checkpointed(fn, use_reentrant=True),
    "selective": lambda fn: checkpointed(fn, use_reentrant=False, context_fn=selective),
    "fake tensors": in_fake_mode,
    "compiled": compiled,
    "thread": in_thread,
}


def sample_of(op: Op) -> Sample:
    torch.manual_seed(0)
    return next(iter(op.samples(torch.device("cpu"), torch.float32)))


def call_of(op: Op) -> Call:
    sample = sample_of(op)
    args, kwargs, _ = prepare(op, sample, differentiable_inputs(op, sample), copy_with_layout)
    return lambda: as_list(op.overload(*args, **kwargs))


def modules() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    made = {
        "RMSNorm": llmk.nn.RMSNorm(16),
        "LayerNorm": llmk.nn.LayerNorm(16),
        "DyT": llmk.nn.DyT(16),
        "PolyNorm": llmk.nn.PolyNorm(16),
        "SwiGLUMLP": llmk.nn.SwiGLUMLP(16, 8),
        "GeGLUMLP": llmk.nn.GeGLUMLP(16, 8),
        "TiledMLP": llmk.nn.TiledMLP(llmk.nn.SwiGLUMLP(16, 8), 2),
    }
    inputs: dict[str, tuple[nn.Module, Tensor]] = {name: (module, x) for name, module in made.items()}
    return inputs | {
        "GroupNorm": (llmk.nn.GroupNorm(2, 4), torch.randn(2, 4, 5)),
        "Embedding": (llmk.nn.Embedding(7, 16), torch.tensor([1, 5, 1])),
    }


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def of_operator(action: Callable[[Call], Any], op: Op) -> str:
    action(call_of(op))
    outcome = call(op, sample_of(op))
    return digest([result for result in outcome.results() if result is not None])


def of_module(action: Callable[[Call], Any], module: nn.Module, x: Tensor) -> str:
    action(lambda: [module(x)])
    module.zero_grad()
    y = module(x)
    backward([y])
    return digest([y, *(p.grad for p in module.parameters() if p.grad is not None)])


def found(action: Callable[[Call], Any]) -> dict[str, str]:
    cases: dict[str, Callable[[], str]] = {name: lambda op=op: of_operator(action, op) for name, op in OPS.items()}
    cases |= {name: lambda case=case: of_module(action, *case) for name, case in modules().items()}
    results = {}
    for name, case in cases.items():
        try:
            results[name] = case()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    list(OPS)  # each action's process has imported the operators and called none
    for action_name in ACTIONS:
        if os.fork() == 0:
            line = json.dumps({action_name: found(ACTIONS[action_name])})
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
