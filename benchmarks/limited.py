"""A measurement in a process of its own, which is ended if compiling takes longer than a limit.

A compiler that is busy in C++ or in autograd's thread hears no signal, so that only ending its process ends it.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

COMPILED = "compiled"


def with_limit(seconds: float, measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return `measure(*arguments, compiled)`, which calls `compiled()` once, when what takes long is compiled.

    The limit counts from the start of the process, its imports included. What comes after `compiled()` has none.

    Raises:
        TimeoutError: The limit was reached.
        RuntimeError: The process ended by itself.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, measure, arguments))
    process.start()
    assert process.pid is not None
    there.close()
    try:
        if not here.poll(seconds):
            raise TimeoutError(f"did not compile in {seconds:.0f} s")
        message = here.recv()
        return here.recv() if message == COMPILED else message
    except EOFError as error:
        raise RuntimeError("its process ended, which most often means that memory ran out") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
        process.kill()
        process.join()


def _run(connection: Connection, measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    connection.send(measure(*arguments, lambda: connection.send(COMPILED)))
