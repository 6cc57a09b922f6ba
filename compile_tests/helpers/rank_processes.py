"""Processes forked from a server that has imported, once for all of them, what they need; and checks on ranks."""

import datetime
import faulthandler
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from compile_tests.helpers.garbage import collect_seldom
from compile_tests.helpers.without_cpp import write_no_cpp

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = [
    "torch.distributed.tensor",
    "torch._inductor.compile_fx",
    "llmk.ops",
    "llmk.opcheck",
    "transformers.models.llama.modeling_llama",
    "pytest",
]
"""These take most of a process' time until its first call; what is not installed is left out. No GPU is in use then."""


def server() -> ForkServerContext:
    """Start processes from it."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def start_ranks(
    function: Callable[..., None], args: tuple[Any, ...], world: int, *, method: str = "forkserver"
) -> None:
    """Run `function(rank, *args)` in `world` processes and wait for them; an error of any is raised."""
    if method == "forkserver":
        server()
    mp.start_processes(function, args, nprocs=world, start_method=method)  # type: ignore[attr-defined]


def here() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


Checks = Callable[[int, int], Mapping[str, Callable[[], None]]]
"""The checks of a rank of so many, by their names, in the order that all ranks have."""


def errors_of_ranks(checks: Checks, world: int, folder: Path, device_type: str = "cpu") -> list[str]:
    """Run the checks on all ranks of a process group, gloo's or a GPU's for each, and return what went wrong."""
    if device_type == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    # What was imported may have looked at the GPUs, and a process forked after that cannot use them.
    method = "spawn" if device_type == "cuda" else "forkserver"
    start_ranks(_check, (checks, world, folder, device_type), world, method=method)
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]
    return [f"{name}, rank {rank}:\n{error}" for rank, found in enumerate(ranks) for name, error in found.items()]


def _check(rank: int, checks: Checks, world: int, folder: Path, device_type: str) -> None:
    """Write what went wrong on a rank into a file."""
    collect_seldom()
    faulthandler.enable()  # a rank that dies of a signal says in which check
    torch.set_num_threads(1)
    # AOTAutograd's cache takes DTensors for equal whose local sizes differ: a rank would be given another's graph.
    torch._functorch.config.enable_autograd_cache = False
    on_gpu = device_type == "cuda"
    if not on_gpu:
        write_no_cpp()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    errors: dict[str, str] = {}
    for name, check in checks(rank, world).items():
        faulthandler.dump_traceback_later(110)  # what a rank waits for, before the others give it up after 120 seconds
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            errors[name] = traceback.format_exc()
        # A rank that failed may have left others waiting: nothing after it can be trusted.
        failed = torch.tensor(name in errors, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            errors.setdefault(name, "another rank failed")
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(errors))
    dist.destroy_process_group()
