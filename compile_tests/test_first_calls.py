"""The first call of an operator or a module in a process may be of any kind: the plain call after it is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_no_first_call_changes_the_next() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(HERE / "first_calls.py")], capture_output=True, text=True, env=environment, check=True
    )
    results = {name: of for line in done.stdout.splitlines() for name, of in json.loads(line).items()}
    plain = results.pop("plain")
    assert len(results) == 9, done.stderr
    assert all(len(text) == 64 for text in plain.values()), plain
    wrong = {(action, name): of[name] for action, of in results.items() for name in plain if of[name] != plain[name]}
    assert not wrong
