"""Processes forked from a server that has imported, once for all of them, what they need."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = [
    "torch.distributed.tensor",
    "torch._inductor.compile_fx",
    "llmk",
    "transformers.models.llama.modeling_llama",
    "pytest",
]
"""These take most of a process' time until its first call; what is not installed is left out. No GPU is in use then."""


def server() -> ForkServerContext:
    """Start processes from it."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def start_ranks(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Run `function(rank, *args)` in `world` processes and wait for them; an error of any is raised."""
    server()
    mp.start_processes(function, args, nprocs=world, start_method="forkserver")  # type: ignore[attr-defined]
