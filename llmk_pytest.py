"""A plugin of pytest: `pytest --opcheck my_ops.py` checks the operators of a file, a test for each promise.

It stands beside the package, because pytest imports it in every run, and importing `llmk` takes seconds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("llmk.opcheck")
    group.addoption(
        "--opcheck",
        action="append",
        metavar="FILE",
        help="check the operators of this file, the llmk.registry.Op records at its top level; may be repeated",
    )
    group.addoption(
        "--opcheck-dtype", action="append", metavar="DTYPE", help="in this dtype; may be repeated (default: all)"
    )


def pytest_configure(config: pytest.Config) -> None:
    files = config.getoption("--opcheck") or []
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise pytest.UsageError(f"--opcheck: no file {missing[0]}")
    if files:
        config.args[:] = [*config.args, *files] if config.args_source is config.ArgsSource.ARGS else files


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    files = parent.config.getoption("--opcheck") or []
    if file_path not in [Path(file).resolve() for file in files]:
        return None
    return _Operators.from_parent(parent, path=file_path)


class _Operators(pytest.File):
    """The operators of a file, and the results of those that were checked."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.results: dict[Any, list[Any]] = {}

    def collect(self) -> Iterator[pytest.Item]:
        import torch

        from llmk.opcheck.foreign.loading import NotLoaded, find_ops
        from llmk.opcheck.runner import promises_asked

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            ops = find_ops([str(self.path)])
        except NotLoaded as error:
            raise pytest.Collector.CollectError(str(error)) from None
        for op in ops:
            asked = self.config.getoption("--opcheck-dtype")
            dtypes = [getattr(torch, name) for name in asked] if asked else op.dtypes
            for place, dtype in enumerate(dtypes):
                for promise in promises_asked(op, device, first_dtype=not place):
                    name = f"{op.name}-{str(dtype).removeprefix('torch.')}-{promise}"
                    yield _Promise.from_parent(self, name=name, call=(op, dtype, device), promise=promise)


class _Promise(pytest.Item):
    """One promise of one operator in one dtype."""

    parent: _Operators

    def __init__(self, *, call: tuple[Any, ...], promise: str, **known: Any) -> None:
        super().__init__(**known)
        self.call, self.promise = call, promise

    def runtest(self) -> None:
        from llmk.opcheck.report.causes import causes

        results = [result for result in self._results() if result.promise in (self.promise, "runs")]
        broken = causes(results)
        if broken:
            raise Broken("\n\n".join(map(str, broken)))
        if all(result.verdict == "empty" for result in results):
            pytest.skip(next((result.message for result in results if result.message), "nothing to check"))

    def _results(self) -> list[Any]:
        """Return those of all promises of the operator that this run has tests of: they share what is computed."""
        from llmk.opcheck import check

        op, dtype, device = self.call
        known, key = self.parent.results, (op.name, dtype)
        if key not in known:
            beside = [item for item in self.session.items if isinstance(item, _Promise) and item.call == self.call]
            only = [item.promise for item in beside] or [self.promise]
            known[key] = check(op, device=device, dtypes=[dtype], only=only)
        return known[key]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Broken) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class Broken(Exception):
    """A promise is broken; the text is the report of the command line."""
