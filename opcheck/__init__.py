"""Checks that operators keep what they promise: `python -m llmk.opcheck`, or `check(op)` for one of your own."""

from llmk.accuracy.rule import Violation, accuracy_violation
from llmk.opcheck.foreign.samples import record
from llmk.opcheck.report.reports import assert_passes
from llmk.opcheck.runner import Result, check, path_taken

__all__ = ["Result", "Violation", "accuracy_violation", "assert_passes", "check", "path_taken", "record"]
