"""A build of the repository holds every operator, in whatever folder its file is, the licence and its name."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import llmk
from llmk.registry import OPS

ROOT = Path(__file__).resolve().parent.parent
NEW = Path("ops/pointwise/of_a_kind/new_op.py")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with a file in a folder that no list can know."""
    root = tmp_path_factory.mktemp("packaging") / "llmk"
    made = shutil.ignore_patterns(".*", "__pycache__", "_build", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, root, symlinks=True, ignore=made)
    (root / NEW).parent.mkdir()
    (root / NEW.with_name("__init__.py")).touch()
    (root / NEW).touch()
    return root


def build(source: Path, what: str, into: Path, **variables: str) -> Path:
    code = f"import setuptools.build_meta as backend; print(backend.build_{what}({str(into)!r}))"
    command, settings = [sys.executable, "-c", code], os.environ | variables
    result = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return into / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    archive = build(copy, "sdist", folder)
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def sources(root: Path) -> set[str]:
    """Every file of the packages, under the name that it is imported by."""
    own = {path.relative_to(root) for path in (root / "llmk").glob("**/*.py")}
    own |= {Path("llmk/py.typed"), Path("llmk/estimate/figures.json"), Path("llmk/hub/card.md")}
    linked = {
        path.relative_to(root) for folder in ("ops", "registry", "opcheck") for path in (root / folder).glob("**/*.py")
    }
    names = {path for path in own if path.parts[1] not in ("ops", "registry", "opcheck")}
    return {"llmk_pytest.py", *(str(path) for path in names | {"llmk" / path for path in linked})}


def test_wheel_holds_every_source_and_nothing_else(copy: Path, wheel: Path) -> None:
    names = names_in(wheel)
    assert names == sources(copy)
    assert str("llmk" / NEW) in names
    assert {f"{op.module.replace('.', '/')}.py" for op in OPS.values()} <= names


def test_a_wheel_is_small_and_has_what_is_used(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_000_000
    assert {name.partition("/")[0] for name in names_in(wheel)} == {"llmk", "llmk_pytest.py"}
    assert not [name for name in names_in(wheel) if re.search(r"(^|/)(compile_tests|tests?|benchmarks|tools)/", name)]


def test_wheel_of_the_source_archive_is_the_same(copy: Path, unpacked: Path, tmp_path: Path) -> None:
    assert names_in(build(unpacked, "wheel", tmp_path)) == sources(copy)


def test_licence_is_in_both(wheel: Path, unpacked: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert b"END OF TERMS AND CONDITIONS" in licence
    assert (unpacked / "LICENSE").read_bytes() == licence
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == licence


def test_metadata_says_what_it_is(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Version"] == llmk.__version__
    assert said["Requires-Python"] == ">=3.11"
    assert "Operating System :: POSIX :: Linux" in said.get_all("Classifier", [])
    assert {"test", "docs", "trl"} <= set(said.get_all("Provides-Extra", []))
    assert [r for r in said.get_all("Requires-Dist", []) if "extra" not in r] == ["torch>=2.11", "triton>=3.6"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert str(said.get_payload()) == (ROOT / "README.md").read_text()
    assert said["Project-URL"] is None  # a build by hand has none to give


def test_page_of_a_release_leads_into_its_repository(copy: Path, tmp_path: Path) -> None:
    """Each link of README becomes the address of a file of the tag, in the repository that the release is built in."""
    said = metadata(build(copy, "wheel", tmp_path, LLMK_REPOSITORY="https://host/owner/name"))
    files, text = f"https://host/owner/name/blob/v{llmk.__version__}/", str(said.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    assert len(links) > 50
    assert [link for link in links if not link.startswith(files)] == []
    for link in links:
        assert (ROOT / re.sub(r"[?#].*", "", link.removeprefix(files))).exists(), link
    pictures = [link for link in links if ".svg" in link]
    assert len(pictures) == 2
    assert all(link.endswith(".svg?raw=true") for link in pictures)
    addresses = dict(line.split(", ") for line in said.get_all("Project-URL", []))
    assert addresses["Source"] == "https://host/owner/name"
    assert addresses["Changes"] == f"{files}CHANGELOG.md"
    assert "LLMK_REPOSITORY" in (ROOT / ".github/workflows/release.yml").read_text()


def test_every_file_has_the_same_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == llmk.__version__  # pyproject.toml takes it from there


PAGES = ["action.yml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]


@pytest.mark.parametrize("name", PAGES)
def test_source_archive_holds_the_pages_of_the_root(unpacked: Path, name: str) -> None:
    assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


COMPILE = """
import sys
from pathlib import Path
import torch, torch._inductor.compile_fx  # what the processes share; nothing runs in this one
from torch._dynamo.utils import counters
from compile_tests.helpers.forked import forked
from compile_tests.helpers.without_cpp import write_no_cpp

def compile_and_require(*outcomes):
    import llmk
    write_no_cpp()
    for outcome in outcomes:
        torch._dynamo.reset()
        counters.clear()
        f = torch.compile(lambda x: torch.ops.llmk.rms_norm(x))
        f(torch.ones(4, 8, requires_grad=True)).sum().backward()
        found = counters["aot_autograd"]
        assert found[f"autograd_cache_{outcome}"] == 1, (outcome, dict(found))

for text, outcomes in (("", ("miss", "hit")), ("EDITED = True", ("miss",))):
    Path(sys.argv[1]).write_text(text)
    done = forked(1, lambda: compile_and_require(*outcomes))
    assert done["codes"] == [0], done["errors"][0]
"""


def test_an_edit_in_any_folder_misses_the_cache_of_compiled_graphs(copy: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(copy), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(NEW)]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
