"""What tests of opcheck share."""

import subprocess
from types import SimpleNamespace

import pytest

from compile_tests.helpers.scripts import run_module


@pytest.fixture
def forked_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork opcheck's processes from one that has imported what they need; test_opcheck_action.py starts fresh ones."""
    stand_in = SimpleNamespace(run=run_module, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("llmk.opcheck.processes.subprocess", stand_in)
