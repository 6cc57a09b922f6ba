"""Print a hash of the machine code of every kernel that workloads and samples launch, to compare two commits.

python -m tools.machine_code [OP ...] > before.txt
"""

import hashlib
import re
import sys

import torch

from compile_tests.helpers.aot import TARGETS, compile_for, describe, launches
from llmk.registry import OPS


def _assembly(ptx: str) -> str:
    """PTX without what only debuggers read: source lines and their sections."""
    lines = ptx.partition("\t.section")[0].splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp|\$L__func)", line))


def main(names: list[str]) -> None:
    for name in names or sorted(OPS):
        for launch in launches(OPS[name], torch.bfloat16):
            ptx = compile_for(launch, TARGETS["sm_90"]).asm["ptx"]
            print(hashlib.sha256(_assembly(ptx).encode()).hexdigest()[:16], name, describe(launch), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
