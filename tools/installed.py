"""Tries what `make wheel` has built, in empty environments with the newest PyTorch that llmk says it supports.

`python -m tools.installed`, or with another release of `tools.matrix` as its argument. The wheel and the source archive
are installed in one environment each. There `python -m llmk` and an opcheck run, and every Python block of README and
documentation as it is printed, away from the checkout. A release of CUDA is 3 GB to download.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from compile_tests.helpers.pages import PYTHON_PAGES, ROOT, script_of
from tools.matrix import VERSIONS


def away_from_the_checkout() -> dict[str, str]:
    """This process's environment without the path on which pip and Python would find llmk in the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def environment_with(file: Path, version: str, folder: Path) -> Path:
    """Install a wheel or an archive and what it needs into a new environment; its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"  # instead of any that pip was set up with
    constraints.write_text("\n".join([f"torch=={version}", *VERSIONS[version]]))
    settings = away_from_the_checkout() | {"PIP_CONSTRAINT": str(constraints)}
    python = folder / "bin" / "python"
    wanted = [f"{file}[transformers]", "numpy"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, env=settings)
    return python


def runs(python: Path, folder: Path, *arguments: str) -> bool:
    """Return whether a command works in `folder`, outside the checkout, and what it wrote if not."""
    command = [str(python), "-W", "ignore", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=away_from_the_checkout(), capture_output=True, text=True, check=False
    )
    print(f"  {'ok    ' if done.returncode == 0 else 'FAILED'}  {' '.join(arguments).replace(str(folder) + '/', '')}")
    if done.returncode:
        print(done.stdout, done.stderr)
    return done.returncode == 0


def main() -> int:
    """The number of commands that do not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    newest = list(VERSIONS)[-1]
    parser.add_argument("version", nargs="?", choices=VERSIONS, default=newest, help="of torch; the newest by default")
    version = parser.parse_args().version
    files = [*(ROOT / "dist").glob("*.whl"), *(ROOT / "dist").glob("*.tar.gz")]
    if len(files) != 2:
        print(f"dist: expected a wheel and a source archive, got {[file.name for file in files]}: make wheel")
        return 2
    failed = 0
    for file in files:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            print(f"{file.name}, torch {version}", flush=True)
            python = environment_with(file, version, folder / "venv")
            commands = [["-m", "llmk"], ["-m", "llmk.opcheck", "add", "--path", "reference"]]
            commands += [[str(script_of(page, folder))] for page in PYTHON_PAGES]
            failed += sum(not runs(python, folder, *command) for command in commands)
    return failed


if __name__ == "__main__":
    sys.exit(main())
