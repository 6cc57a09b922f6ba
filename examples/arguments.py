"""Reading the command lines of the training programs: one line for an error, never a traceback."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class InputError(Exception):
    """An argument of the user's that cannot be used; the message says why."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message, 2)


def fail(message: str, code: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # of several processes, which all fail, one says it
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(code)


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    word = "whole number" if kind is int else "number"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a positive {word}, got {text!r}")
        return value

    return parse
