"""The rule by which a result is right: opcheck's, the compile backend's trials' and the tests'."""

from llmk.accuracy.rule import Violation, accuracy_violation

__all__ = ["Violation", "accuracy_violation"]
