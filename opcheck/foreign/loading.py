"""The operators that the command line and pytest are given: llmk's by name, and those of a file or a module."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmk import registry
from llmk.opcheck.calls import first_line
from llmk.opcheck.foreign.hub import ops_of, package_file, repository
from llmk.opcheck.foreign.kernelbench import problem_of
from llmk.opcheck.foreign.signatures import record_of
from llmk.opcheck.promises.process_state import functions
from llmk.opcheck.runner import require_known
from llmk.registry import Op

HUB = "hub:"
"""The prefix of the folder or the name of a kernel repository."""


class NotLoaded(ValueError):
    """There is no such file, module or operator, or it raises an error; the text is one line."""


def is_own(name: str) -> bool:
    """Return True for an operator of llmk's. They are loaded, which takes two seconds, only for what may name one."""
    return name.isidentifier() and name in registry.OPS


def find_ops(names: Sequence[str]) -> list[Op]:
    """Return the records of llmk's operators, of a Python file, or of a module; all of llmk's where none is named.

    Raises:
        NotLoaded: There is none of a name, its module raises an error, or it leaves out a promise that there is not.
    """
    if not names:
        return list(registry.OPS.values())
    found: list[Op] = []
    for name in names:
        if is_own(name):
            found.append(registry.OPS[name])
            continue
        if name.startswith(HUB):
            found += _of_hub(name)
            continue
        if ":" in name:
            found.append(record_of(named(name), origin=name.partition(":")[0]))
            continue
        before = functions()
        module = _load(name)
        ops = [value for value in vars(module).values() if isinstance(value, Op)]
        if not ops and hasattr(module, "ModelNew"):
            ops = [_problem(module, before, name)]
        if not ops:
            raise NotLoaded(f"{name} holds no llmk.registry.Op; name one of its operators: {name}:NAME")
        found += ops
    for op in found:
        try:
            require_known(op.unchecked)
        except ValueError as error:
            raise NotLoaded(f"the record {op.name}: unchecked: {error}") from None
    return found


def _of_hub(name: str) -> list[Op]:
    """The operators of a folder in the layout of a kernel repository, or of a repository of the Hub."""
    where = name.removeprefix(HUB)
    try:
        ops = ops_of(_load(str(package_file(Path(where)))) if Path(where).is_dir() else repository(where))
    except NotLoaded:
        raise
    except ValueError as error:
        raise NotLoaded(f"{name}: {error}") from error
    if not ops:
        raise NotLoaded(f"{name}: the package exports no function, and has no layers")
    return ops


def _problem(module: Any, before: dict[str, Any], name: str) -> Op:
    try:
        return problem_of(module, before)
    except Exception as error:  # the problem's own
        raise NotLoaded(f"{name}: {first_line(error)}") from error


def named(name: str) -> Any:
    """Return the operator, function or record that `MODULE:NAME` names."""
    module, _, path = name.partition(":")
    found = _load(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise NotLoaded(f"{module} has no {path}")
        found = getattr(found, part)
    if isinstance(found, type) or not (callable(found) or isinstance(found, Op)):
        raise NotLoaded(f"{name} is no operator, function or llmk.registry.Op")
    return found


def _load(name: str) -> Any:
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise NotLoaded(f"no file {name}")
        path = Path(name)
        spec = importlib.util.spec_from_file_location(path.parent.name if path.stem == "__init__" else path.stem, name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # the module's own
            raise NotLoaded(_one_line(error, name)) from error
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise NotLoaded(f"{name!r} is no operator ({', '.join(registry.OPS)}), file or module") from error
        raise NotLoaded(_one_line(error, name)) from error
    except Exception as error:
        raise NotLoaded(_one_line(error, name)) from error


def _one_line(error: Exception, name: str) -> str:
    """Return where a module raises an error when it is imported, and the error, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name != "loading.py"]
    own = [frame for frame in frames if not frame.filename.startswith("<") and Path(frame.filename).stem in name]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
