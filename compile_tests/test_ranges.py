"""The versions of other packages: declared once, and a line for one outside of them."""

import json
import re
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from llmk import __main__ as about
from llmk.ranges import check_version
from tools.matrix import RESULT, VERSIONS

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed, which a test may change, beside llmk with this pyproject.toml."""
    found = {"transformers": "5.20.0"}
    lines = [f'{line}; extra == "{extra}"' for extra, wanted in EXTRAS.items() for line in wanted]
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.11", *lines])
    monkeypatch.setattr(metadata, "version", lambda name: found[name])
    return found


def test_a_version_of_the_range(versions: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for versions["transformers"] in ("5.17.0", "5.24.0", "5.24.1.dev0"):
            check_version("transformers", "llmk.transformers")


def test_a_version_outside_of_the_range_is_named_in_a_line(versions: dict[str, str]) -> None:
    said = r"transformers: expected \S+, the versions that llmk.transformers is tested with, got "
    versions["transformers"] = "5.25.0"
    with pytest.warns(UserWarning, match=rf"^{said}5.25.0$"):
        check_version("transformers", "llmk.transformers")
    versions["transformers"] = "4.57.6"
    with pytest.raises(ImportError, match=rf"^{said}4.57.6: pip install 'llmk\[transformers\]'$"):
        check_version("transformers", "llmk.transformers")
    assert about.installed("transformers", "llmk.transformers").endswith("got 4.57.6")


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version("absent", "llmk.something")
    monkeypatch.setattr(metadata, "requires", lambda name: metadata.distribution("absent"))  # llmk from a checkout
    check_version("transformers", "llmk.transformers")


def test_each_range_is_declared_once() -> None:
    """Any other extra refers to the one of the package's name."""
    for name in ("transformers", "trl"):
        lines = [line for wanted in EXTRAS.values() for line in wanted if re.match(rf"{name}\W", line)]
        assert [line for line in lines if "[" not in line] == [line for line in EXTRAS[name] if line.startswith(name)]


def test_the_matrix_runs_both_ends() -> None:
    from packaging.requirements import Requirement

    environments = [[Requirement(line) for line in wanted] for wanted in VERSIONS.values()]
    for name in ("transformers", "trl"):
        (specifier,) = (r.specifier for r in map(Requirement, EXTRAS[name]) if r.name == name)
        bounds = {bound.operator: bound.version for bound in specifier}
        tried = [str(r.specifier).removeprefix("==") for wanted in environments for r in wanted if r.name == name]
        major, minor = tried[-1].split(".")[:2]
        assert tried[0] in (bounds[">="], f"{bounds['>=']}.0")
        assert bounds["<"] == f"{major}.{int(minor) + 1}"
        assert specifier.contains(tried[-1])
    assert json.loads(RESULT.read_text()).keys() == VERSIONS.keys()
