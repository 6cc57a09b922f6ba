"""Python files run as `python FILE ARGUMENTS` runs them, in processes forked from a server with their imports.

A fork has the server's modules, so an import that a file lacks may go unseen, Inductor compiles no C++, and what a file
would spawn is forked: `tools.installed` and `make train` start fresh ones.
"""

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compile_tests.helpers.garbage import collect_seldom
from compile_tests.helpers.rank_processes import ROOT, server
from compile_tests.helpers.without_cpp import write_no_cpp


def run_script(file: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `file` with one thread, from the root of the repository: its exit code and what it wrote."""
    words = [str(file), *map(str, arguments)]
    return _forked(partial(_run_file, words), words, ROOT)


def run_module(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Stand for `subprocess.run` of `python -X faulthandler -m MODULE ARGUMENTS`."""
    assert command[1:4] == ["-X", "faulthandler", "-m"]
    return _forked(partial(_run_module, list(command[4:]), env), command, Path.cwd())


def _forked(run: Callable[[], None], words: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = server().Process(target=_redirected, args=(run, where, out, err))
        process.start()
        process.join()
        code = process.exitcode
        assert code is not None
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _redirected(run: Callable[[], None], where: Path, out: Path, err: Path) -> None:
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    collect_seldom()
    os.chdir(where)
    torch.set_num_threads(1)
    write_no_cpp()
    multiprocessing.get_context = partial(_context, multiprocessing.get_context)
    run()


def _context(contexts: Callable[[str | None], Any], method: str | None = None) -> Any:
    """Return a fork's context where a fresh process is asked for."""
    return contexts("fork" if method == "spawn" else method)


def _run_file(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _run_module(words: list[str], env: Mapping[str, str]) -> None:
    faulthandler.enable()
    os.environ.update(env)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
