"""One of several processes that run examples/train_hf.py a few times, without importing everything for each.

    RANK=0 WORLD_SIZE=2 ... python train_hf_driver.py '[["--parallel", "ddp", ...], ...]' [failure]

With a failure, "memory" or "surprise", the last process fails in the second step.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_hf

rendezvous = dist.rendezvous
FAILURES = {"memory": torch.OutOfMemoryError, "surprise": ArithmeticError}


def with_prefix(prefix, url):
    """The groups of one process after another share a store, in which each needs keys of its own."""
    store, rank, count = next(rendezvous(url))
    yield dist.PrefixStore(prefix, store), rank, count


class FailingBatches(train_hf.Batches):
    def __call__(self, step):
        if step == 1 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise FAILURES[sys.argv[2]]("the last process stumbled")
        return super().__call__(step)


if __name__ == "__main__":
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # quick
    if len(sys.argv) > 2:
        train_hf.Batches = FailingBatches
    for number, args in enumerate(json.loads(sys.argv[1])):
        torch._dynamo.reset()
        dist.rendezvous = functools.partial(with_prefix, f"run {number}")
        train_hf.main(args)
