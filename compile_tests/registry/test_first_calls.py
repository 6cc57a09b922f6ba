"""The first call of an operator or a module in a process may be of any kind: the plain call after it is the same."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_first_call_changes_the_next() -> None:
    command = [sys.executable, "-m", "compile_tests.helpers.first_calls"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    results = {name: of for line in done.stdout.splitlines() for name, of in json.loads(line).items()}
    plain = results.pop("plain")
    assert len(results) == 9, done.stderr
    assert all(len(text) == 64 for text in plain.values()), plain
    wrong = {(action, name): of[name] for action, of in results.items() for name in plain if of[name] != plain[name]}
    assert not wrong
