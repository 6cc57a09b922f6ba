"""A limit to the time of a call: a loop on the host may never end."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import triton

from llmk.opcheck.inputs import BrokenPromise


class TookTooLong(BrokenPromise):
    """A call did not come back in time."""


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise inside after so many seconds; only a process's first thread can.

    Time in Triton's compiler does not count: it ends by itself, and on a busy machine the kernels of a first call take
    longer than any call may. The time is looked at in parts, each of which is one or the other.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    spent, since = 0.0, time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal spent, since
        now = time.monotonic()
        spent, since = spent + (0.0 if _compiles(frame) else now - since), now
        if spent >= seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TookTooLong(f"no end after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds / 16, seconds / 16)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _compiles(frame: FrameType | None) -> bool:
    """Return True if a frame, or one that called it, is of Triton's compiler, which loads what it made too."""
    while frame is not None:
        if frame.f_globals.get("__name__") == triton.compile.__module__:
            return True
        frame = frame.f_back
    return False
