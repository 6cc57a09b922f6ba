"""Ways to call a program of the backend's fuzzer that must not change what it computes."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import llmk.compiler  # noqa: F401 offers the backend
from compile_tests.helpers.fuzz_program import Line, Program
from compile_tests.helpers.without_cpp import WITHOUT_CPP

Fn = Callable[..., Any]
Way = Callable[[Fn], Fn]
AS_EAGER: dict[str, Any] = {"fallback_random": True} | WITHOUT_CPP
"""Inductor draws as eager mode does and compiles no C++, where it has these settings."""


def plainly(fn: Fn) -> Fn:
    return fn


def checkpointed(fn: Fn) -> Fn:
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


def hooked(fn: Fn) -> Fn:
    """Run under hooks that look at the memory of what is saved, which fake tensors do not have."""

    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_looked_at, _same):
            return fn(*args)

    return run


def _looked_at(x: Tensor) -> Tensor:
    x.untyped_storage().data_ptr()
    return x


def _same(x: Tensor) -> Tensor:
    return x


def without_gradients(fn: Fn) -> Fn:
    return torch.no_grad()(fn)


def from_a_cache(fn: Fn) -> Fn:
    """Through Inductor, after the same program with other literals: see `way_of`."""
    return fn


CALLS: dict[str, Callable[[Fn], Fn]] = {
    "plainly": plainly,
    "checkpointed": checkpointed,
    "hooked": hooked,
    "without gradients": without_gradients,
    "from a cache": from_a_cache,
}


def around(program: Program, fn: Fn) -> Fn:
    """Return the function as the program wants it called."""
    return CALLS[program.called or "plainly"](fn)


def way_of(program: Program, way: Way) -> Way:
    """Return the way with what comes around the compiled function, and what comes before its call."""
    return as_called(program, _after_other_literals(program) if program.called == "from a cache" else way)


def as_called(program: Program, way: Way) -> Way:
    """Return the way with what comes around the compiled function, after calls with other numbers."""
    return lambda fn: _after_other_numbers(around(program, way(fn)), around(program, fn))


def _after_other_numbers(fn: Fn, eager: Fn) -> Fn:
    """Return a function that calls another one with other numbers first, where eager mode takes these."""

    def run(*args: Any) -> Any:
        state = torch.get_rng_state()
        for more in (0.25, 0.5) if any(isinstance(x, float) for x in args) else ():
            others = [x + more if isinstance(x, float) else x for x in args]
            if _runs(eager, others):
                fn(*_copies(others))
            torch.set_rng_state(state)
        return fn(*args)

    return run


def _runs(fn: Fn, args: Sequence[Any]) -> bool:
    try:
        fn(*_copies(args))
    except Exception:
        return False
    return True


def _copies(args: Sequence[Any]) -> list[Any]:
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]


def _after_other_literals(program: Program) -> Way:
    other = replace(program, lines=tuple(_other_literals(program))).function()

    def compiled(fn: Fn) -> Fn:
        torch._dynamo.reset()
        return torch.compile(fn, backend="llmk", options=AS_EAGER)

    def way(fn: Fn) -> Fn:
        def run(*args: Any) -> Any:
            state = torch.get_rng_state()
            with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
                _trained(compiled(other)(*_copies(args)))
                torch.set_rng_state(state)
                return compiled(fn)(*args)

        return run

    return way


def _other_literals(program: Program) -> Iterator[Line]:
    for line in program.lines:
        is_literal = line.target is torch.tensor
        yield replace(line, args=([x + 1 for x in line.args[0]],)) if is_literal else line


def _trained(results: Any) -> None:
    """Run the backward pass, as AOTAutograd stores an entry once that is compiled."""
    wanting = [x.abs().sum() for x in results if isinstance(x, Tensor) and x.requires_grad]
    if wanting:
        torch.autograd.backward(wanting)
