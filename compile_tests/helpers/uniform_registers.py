"""Uniform registers that a kernel reads and never wrote: the machine code is wrong, whatever the kernel says.

In some kernels the ptxas of Triton 3.6 and 3.7.1 forgets to copy an address to the uniform register that it adds an
offset to. On sm_90 such a sum describes where in shared memory an operand of a product is. The product then reads
whatever is there: results change from run to run, or an access is illegal. A GPU shows it by chance and
compute-sanitizer does not, but the machine code does.
"""

import re
from dataclasses import dataclass
from typing import Any

from compile_tests.helpers.aot import dumped

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
_LEAVES = {"EXIT", "RET", "KILL", "JMX", "BRX"}
_BRANCHES = {"BRA", "CALL", "JMP", "BSSY"}
_FOUND: dict[bytes, "list[Instruction]"] = {}


@dataclass(frozen=True)
class Instruction:
    """A line of machine code."""

    address: int
    predicated: bool
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.name} {self.operands}"

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> int | None:
        found = re.search(r"\b0x([0-9a-f]+)$", self.operands) if self.kind in _BRANCHES else None
        return int(found[1], 16) if found else None

    @property
    def goes_on(self) -> bool:
        """True if the next line may be reached from it."""
        always = self.kind in _LEAVES or (self.name in ("BRA", "JMP") and "," not in self.operands)
        return self.predicated or not always

    @property
    def width(self) -> int:
        """Return how many registers a number has."""
        return 2 if re.search(r"\.64|\.WIDE", self.name) else 1

    @property
    def writes(self) -> set[int]:
        """The uniform registers of the first operand, unless it is an address or a branch's."""
        found = re.match(r"UR(\d+)\b", self.operands)
        if found is None or self.kind in _LEAVES | _BRANCHES:
            return set()
        return set(range(int(found[1]), int(found[1]) + self.width))

    @property
    def reads(self) -> set[int]:
        """The uniform registers of the others; of a product's descriptors those of operands in shared memory."""
        operands = self.operands.partition(",")[2] if self.writes else self.operands
        if "gdesc" in operands:
            found = re.search(r"gdesc\[UR(\d+)\]", operands)
            assert found
            both = re.match(r"R\d+, gdesc", operands) is not None  # the first operand may be in registers
            return set(range(int(found[1]) + (0 if both else 2), int(found[1]) + 4))
        return {int(number) for number in re.findall(r"\bUR(\d+)", operands)}


def instructions(code: str) -> list[Instruction]:
    """The lines of what `cuobjdump -sass` prints of one kernel."""
    return [Instruction(int(at, 16), bool(guard), name, rest) for at, guard, name, rest in _LINE.findall(code)]


def undefined_reads(code: str) -> list[Instruction]:
    """The instructions that read a uniform register which is written on no path to them."""
    lines = instructions(code)
    index = {line.address: i for i, line in enumerate(lines)}
    reached: list[set[int] | None] = [None] * len(lines)  # what may be written before each line
    waiting: list[tuple[int, set[int]]] = [(0, set())] if lines else []
    while waiting:
        i, written = waiting.pop()
        before = reached[i]
        if before is not None and written <= before:
            continue
        reached[i] = written = written | (before or set())
        line, after = lines[i], written | lines[i].writes
        if line.goes_on and i + 1 < len(lines):
            waiting.append((i + 1, after))
        if line.target in index:
            waiting.append((index[line.target], after))
    return [line for line, written in zip(lines, reached, strict=True) if written is not None and line.reads - written]


def undefined_descriptors(compiled: Any) -> list[Instruction]:
    """`undefined_reads` of a kernel for sm_90 with a warp group's product; others describe nothing so.

    Operators that share a kernel have the same code, which is looked at once.
    """
    if "wgmma" not in compiled.asm["ptx"]:
        return []
    cubin = compiled.asm["cubin"]
    if cubin not in _FOUND:
        _FOUND[cubin] = undefined_reads(dumped(compiled, "-sass"))
    return _FOUND[cubin]
