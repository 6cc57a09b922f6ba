"""llmk on the releases of PyTorch, transformers and TRL that people install, each in an environment of its own.

`python -m tools.matrix` makes the environments, runs the checks of matrix_checks.py in each, one after the other, and
writes what came out to docs/versions.json, which the documentation shows. A release of CUDA is 3 GB to download and 6
GB on disk. The checks themselves run on a CPU: it says how the releases differ, not the GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tools.matrix_checks import CHECKS

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "versions.json"
LONGEST = 3600  # seconds of a check

# What is installed with each torch: the Triton of its release, and both ends of the ranges of pyproject.toml.
VERSIONS: dict[str, tuple[str, ...]] = {
    "2.11.0": (
        "triton==3.6.0",
        "numpy<2.4",  # with numpy 2.4 that Triton's interpreter fails at any loop
        "transformers==5.17.0",
        "trl==1.16.0",
        "peft==0.21.0",
    ),
    "2.13.0": ("triton==3.7.1", "numpy==2.4.6", "transformers==5.23.0", "trl==1.16.0", "peft==0.21.2"),
    "2.15.0": ("triton==3.9.0", "numpy==2.4.6", "transformers==5.24.0", "trl==1.16.0", "peft==0.21.2"),
}


def make_environment(folder: Path, version: str) -> Path:
    """Install a release into `folder/VERSION`, unless it is there, and return its Python."""
    environment = folder / version
    python = environment / "bin" / "python"
    wanted = [f"torch=={version}", *VERSIONS[version], "expecttest", "pytest"]
    stamp = environment / ".installed"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    with tempfile.TemporaryDirectory() as here:
        constraints = Path(here) / "constraints.txt"
        constraints.write_text("\n".join(wanted))  # instead of any that pip was set up with
        settings = os.environ | {"PIP_CONSTRAINT": str(constraints)}
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, env=settings)
    stamp.write_text("\n".join(wanted))
    return python


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run_check(python: Path, name: str) -> dict[str, object]:
    """Return whether the check passed, the last line that it wrote, its seconds and its commit."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TORCH"))}
    settings |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-W", "ignore", "-m", "tools.matrix_checks", name]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as caches:
        settings |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=LONGEST)
            passed, output = done.returncode == 0, done.stdout.strip()
            if not passed:
                sys.stderr.write(f"{done.stdout}{done.stderr}")
                output = done.stderr.strip() or output
        except subprocess.TimeoutExpired:
            passed, output = False, f"took more than {LONGEST} seconds"
    said = output.splitlines()[-1] if output else ""
    return {"passed": passed, "said": said, "seconds": round(time.monotonic() - start), "commit": commit()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", choices=[*VERSIONS, []], help="of torch; all by default")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="this one only; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="where the environments are")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for version in asked.versions or VERSIONS:
        python = make_environment(folder, version)
        row = results.setdefault(version, {"checks": {}})
        for name in asked.check or CHECKS:
            outcome = row["checks"][name] = run_check(python, name)
            print(
                f"torch {version}  {name:<12} {'ok' if outcome['passed'] else 'FAILED'}  {outcome['said']}", flush=True
            )
            row["date"] = date.today().isoformat()
            if name == "import" and outcome["passed"]:
                row["versions"] = json.loads(str(outcome["said"]))
            RESULT.write_text(json.dumps({version: results[version] for version in sorted(results)}, indent=1) + "\n")
    checks = [check for version in asked.versions or VERSIONS for check in results[version]["checks"].values()]
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
