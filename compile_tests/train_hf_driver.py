"""Runs examples/train_hf.py in several processes, which are forked so that one import serves them all.

    python train_hf_driver.py '[{"count": 2, "runs": [["--parallel", "ddp", ...], ...], "failure": ""}, ...]'

The processes of a launch do its runs one after another. With a failure, "memory" or "surprise", the last process fails
in the second step. Prints a line of JSON for each launch: each process' exit code, and what it wrote to stderr.
"""

import functools
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import parallel
import train_hf

LONGEST = 300  # seconds of a launch: one that waits for ever is ended
FAILURES = {"memory": torch.OutOfMemoryError, "surprise": ArithmeticError}


def with_prefix(prefix, store, rank, count):
    """In place of `rendezvous`: the runs of a process share a store, in which each needs keys of its own."""
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


def start(launch, rank, port, errors):
    """Like a process that torchrun starts; returns its id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(LONGEST)
    code = 1
    try:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        count = str(launch["count"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run(launch)
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def outcome(launch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(launch["count"])]
        children = [start(launch, rank, port, file) for rank, file in enumerate(files)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return {"codes": codes, "errors": [file.read_text() for file in files]}


if __name__ == "__main__":
    for launch in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(outcome(launch)) + "\n")
        sys.stdout.flush()  # before the next launch forks it
