"""Runs examples/train_hf.py in several processes.

    python -m compile_tests.helpers.train_hf_driver \
        '[{"count": 2, "runs": [["--parallel", "ddp", ...], ...], "failure": ""}, ...]'

The processes of a launch do its runs one after another. With a failure, "memory" or "surprise", the last process fails
in the second step. Prints a line of JSON for each launch: each process' exit code, and what it wrote to stderr.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from compile_tests.helpers.forked import forked

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import parallel
import train_hf

FAILURES = {"memory": torch.OutOfMemoryError, "surprise": ArithmeticError}


def with_prefix(prefix, store, rank, count):
    """Replace `rendezvous`: the runs of a process share a store, in which each needs keys of its own."""
    return lambda url: iter([(dist.PrefixStore(prefix, store), rank, count)])


class FailingBatches(train_hf.Batches):
    failure = ""

    def __call__(self, step):
        if step == 1 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise FAILURES[self.failure]("the last process stumbled")
        return super().__call__(step)


def run(launch):
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # quick
    if launch["failure"]:
        FailingBatches.failure = launch["failure"]
        train_hf.Batches = FailingBatches
    found = next(parallel.rendezvous("env://"))
    for number, args in enumerate(launch["runs"]):
        torch._dynamo.reset()
        parallel.rendezvous = with_prefix(f"run {number}", *found)
        train_hf.main(args)


if __name__ == "__main__":
    for launch in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(forked(launch["count"], functools.partial(run, launch))) + "\n")
        sys.stdout.flush()  # before the next launch forks it
