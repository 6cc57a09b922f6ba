"""The processes of a group, forked from a server that has imported PyTorch once for all of them."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

IMPORTED = ["torch.distributed.tensor", "torch._inductor.compile_fx", "pytest"]
"""These take 6 of the 7 seconds of a core that a process needs until its first call; the server has no GPU in use."""


def start_ranks(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Run `function(rank, *args)` in `world` processes and wait for them; an error of any is raised."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(function, args, nprocs=world, start_method="forkserver")  # type: ignore[attr-defined]
