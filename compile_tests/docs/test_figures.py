"""Time and memory of a training step, as README and the pages have them, are those of one row of a results file."""

import json
import re
from pathlib import Path

import pytest

from compile_tests.helpers.pages import PAGES, ROOT

STEPS = sorted((ROOT / "benchmarks" / "results").glob("train-step*.json"))
TIME, MEMORY = r"(?P<ms>\d+(?:\.\d+)?) ms", r"(?P<gib>\d+(?:\.\d+)?) GiB"
PAIRS = [re.compile(TIME + r"(?:,| and) " + MEMORY), re.compile(MEMORY + r" and " + TIME)]


def steps_of(text: str) -> list[tuple[str, str]]:
    """Time and memory where they are given together, as they are written."""
    return [(match["ms"], match["gib"]) for pair in PAIRS for match in pair.finditer(text)]


def prose_of(page: Path) -> str:
    """A page without its fenced blocks, with a space for each line's end."""
    return " ".join(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split())


def rows_with(ms: str, gib: str) -> set[tuple[str, str]]:
    """The files and models of the rows that round to what is written."""
    return {
        (file.stem, row["model"])
        for file in STEPS
        for row in json.loads(file.read_text())["rows"]
        if "ms" in row and (written(row["ms"], ms), written(row["peak_gib"], gib)) == (ms, gib)
    }


def written(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_step_is_a_row_of_a_file(page: Path) -> None:
    unknown = [step for step in steps_of(prose_of(page)) if not rows_with(*step)]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tables_row_is_of_one_run_and_model(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|") and steps_of(line)]
    mixed = [line for line in lines if not set.intersection(*(rows_with(*step) for step in steps_of(line)))]
    assert not mixed


def test_the_pages_have_figures() -> None:
    assert len(steps_of(prose_of(ROOT / "README.md"))) >= 12
