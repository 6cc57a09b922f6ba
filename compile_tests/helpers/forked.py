"""A function run in several processes, which are forked so that one import serves them all."""

import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

LONGEST = 300  # seconds: a process that waits for ever is ended


def forked(count: int, function: Callable[[], None]) -> dict[str, list]:
    """Exit codes of the processes and what they wrote to stderr. torchrun would give them the same environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(count)]
        children = [
            _start(function, file, shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank, file in enumerate(files)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return {"codes": codes, "errors": [file.read_text() for file in files]}


def _start(function: Callable[[], None], errors: Path, environment: dict[str, object]) -> int:
    """Returns the process' id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(LONGEST)
    code = 1
    try:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ |= {name: str(value) for name, value in environment.items()}
        function()
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
    os._exit(code)
