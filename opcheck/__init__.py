"""Checks that operators keep what they promise: `python -m llmk.opcheck`, or `check(op)` for one of your own."""

from llmk.opcheck.accuracy import Violation, accuracy_violation
from llmk.opcheck.reports import assert_passes
from llmk.opcheck.runner import Result, check, path_taken
from llmk.opcheck.samples import record

__all__ = ["Result", "Violation", "accuracy_violation", "assert_passes", "check", "path_taken", "record"]
