"""What ptxas and nvdisasm say of a GPU kernel: registers, spills, and its innermost loops.

Text in, numbers out: nothing here runs a tool. The cycles are a model, not a measurement. They say
how long one warpgroup (four warps, one on each of a multiprocessor's four schedulers) keeps a unit
busy during one round of the loop:

- the matrix units multiply and add 2,048 pairs of 16-bit numbers a cycle, 1,024 of tf32 and 4,096
  of 8-bit numbers; the older instructions of one warp (HMMA) reach half of that;
- the special function unit, which computes exp2, takes 8 cycles for one instruction of a warp;
- shared memory gives 128 bytes a cycle, to matrix products that read their factors there too;
- each scheduler issues one instruction a cycle.

`products_per_cycle` predicts from these: at most what the busiest unit allows, as where warpgroups
take turns and no unit waits; at least what one warpgroup reaches whose matrix units and other
instructions wait for each other. A device lies between.
"""

import collections
import math
import re
from typing import NamedTuple


class Resources(NamedTuple):
    """What a kernel takes, of one thread or one block, as `ptxas -v` says."""

    registers: int
    stack_bytes: int
    spill_bytes: int  # stored; as many or more are loaded
    shared_bytes: int  # static: what is asked for at launch is not in it
    warnings: tuple[str, ...]


class Instruction(NamedTuple):
    """One line of machine code: `HGMMA.64x128x16.F32.BF16` and what follows it, and the predicate
    on which it depends, `P1`."""

    name: str
    operands: str
    predicate: str = ""

    @property
    def root(self) -> str:
        """The name without its suffixes."""
        return self.name.split(".")[0]


class Loop(NamedTuple):
    """An innermost loop over tiles, during one round. Of the matrix units of Blackwell it knows
    neither sizes nor cycles. What warps jump over by a vote, as sums are only rescaled where a
    maximum has moved far, is counted `sometimes`, and nowhere else."""

    instructions: int
    matrix_cycles: int
    special_cycles: int
    shared_cycles: int
    products: int  # pairs of numbers that are multiplied and added
    by_kind: dict[str, int]  # instructions
    sometimes: int = 0  # more instructions

    @property
    def products_per_cycle(self) -> tuple[float, float]:
        """Of a multiprocessor, at least and at most."""
        others = max(self.instructions, self.special_cycles)
        busiest = max(self.matrix_cycles, others, self.shared_cycles)
        alone = max(self.matrix_cycles + others, busiest)
        return self.products / alone, self.products / busiest


_ROOTS = {
    "matrix": "HGMMA QGMMA IGMMA HMMA QMMA IMMA UTCHMMA UTCQMMA UTCIMMA",
    "special": "MUFU",
    "float": "FADD FMUL FFMA FMNMX FSETP FSEL FSET FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2",
    "convert": "F2F F2FP F2I I2F I2FP FRND",
    "integer": "IADD3 IMAD IMNMX ISETP IABS LEA LOP3 SHF SEL PLOP3 PRMT SGXT BMSK VIADD VIMNMX "
    "VIADDMNMX UIADD3 UIMAD UISETP ULEA ULOP3 USHF USEL UPRMT USGXT UPLOP3 P2R R2P POPC FLO",
    "shuffle": "SHFL REDUX VOTE VOTEU",
    "shared": "LDS STS LDSM STSM",
    "global": "LD ST LDG STG LDC ULDC LDGSTS ATOM ATOMG RED UTMALDG UTMASTG UTMAREDG UBLKCP",
    "local": "LDL STL",
    "tensor": "LDTM STTM UTCBAR UTCATOMSWS",
    "wait": "BAR SYNCS WARPGROUP WARPSYNC DEPBAR LDGDEPBAR ELECT FENCE MEMBAR NANOSLEEP "
    "UTMACMDFLUSH UTMACCTL ACQBULK CCTL",
    "move": "MOV UMOV R2UR S2R S2UR CS2R MOVM",
    "jump": "BRA BRX JMP EXIT CALL RET BSSY BSYNC BREAK NOP",
}
_KINDS = {root: kind for kind, roots in _ROOTS.items() for root in roots.split()}

_PRODUCTS_PER_CYCLE = {"HGMMA": 2048, "QGMMA": 4096, "IGMMA": 4096, "HMMA": 1024}
_SPECIAL_CYCLES = 8
_SHARED_BYTES = 128  # a cycle
_WARPS = 4  # of a warpgroup

_NOTHING = Instruction("", "")

_LINE = re.compile(r"\s+/\*[0-9a-f]{4,6}\*/\s+(?:\{\s*)?(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"\s*(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")


def resources(said: str) -> Resources:
    """What `ptxas -v` said of one kernel.

    Raises:
        ValueError: it says nothing of registers.
    """
    registers = re.search(r"Used (\d+) registers", said)
    if registers is None:
        raise ValueError(f"expected 'Used … registers' from ptxas -v, got {said.strip()!r}")

    def first(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return Resources(
        registers=int(registers[1]),
        stack_bytes=first(r"(\d+) bytes stack frame"),
        spill_bytes=first(r"(\d+) bytes spill stores"),
        shared_bytes=first(r"(\d+) bytes smem"),
        warnings=warnings(said),
    )


def warnings(said: str) -> tuple[str, ...]:
    """What ptxas warns of, each once; that it serialises matrix products, it calls information."""
    found = re.findall(
        r"^ptxas \w+\s*:\s*(.*Potential Performance Loss.*?)\s*$"
        r"|^.*?\b(?:warning|error)\b\s*:\s*(.*?)\s*$",
        said,
        re.MULTILINE,
    )
    found = [loss or warning for loss, warning in found]
    return tuple(dict.fromkeys(found))


def kind(instruction: Instruction) -> str:
    """What an instruction is for."""
    return _KINDS.get(instruction.root, "other")


def _sizes(instruction: Instruction) -> tuple[int, int, int]:
    """Rows, columns and depth of what a warpgroup multiplies; zeros for other instructions.

    An HMMA is one warp's, so a warpgroup has four of them.
    """
    if instruction.root not in _PRODUCTS_PER_CYCLE:
        return 0, 0, 0
    wide = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.name)
    narrow = re.search(r"\.(16)(8)(\d+)", instruction.name)  # 16816 is 16 × 8 × 16
    found = wide or narrow
    rows, columns, depth = map(int, found.groups()) if found else (0, 0, 0)
    return rows * (1 if wide else _WARPS), columns, depth


def matrix_cycles(instruction: Instruction) -> float:
    """Cycles for which a warpgroup's instruction keeps the matrix units."""
    products = math.prod(_sizes(instruction))
    if not products:
        return 0.0
    rate = _PRODUCTS_PER_CYCLE[instruction.root]
    return products / (rate / 2 if ".TF32" in instruction.name else rate)


def shared_cycles(instruction: Instruction) -> float:
    """Cycles for which a warpgroup's instruction keeps shared memory."""
    if kind(instruction) == "shared":
        width = re.search(r"\.(64|128)\b", instruction.name)
        matrices = re.search(r"\.M88\.([24])", instruction.name)
        bytes_each = int(width[1]) // 8 if width else 4 * int(matrices[1]) if matrices else 4
        return _WARPS * 32 * bytes_each / _SHARED_BYTES
    if "gdesc" not in instruction.operands:
        return 0.0
    rows, columns, depth = _sizes(instruction)
    size = 4 if ".TF32" in instruction.name else 1 if instruction.root[0] in "QI" else 2
    in_registers = re.match(r"R\d+,\s*R\d+,\s*gdesc", instruction.operands)
    return (columns + (0 if in_registers else rows)) * depth * size / _SHARED_BYTES


def instructions(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions that `nvdisasm -c` printed, and the place of each label among them."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(code)
            continue
        found = _LINE.match(line)
        if found:
            code.append(Instruction(found[2], found[3].strip(), found[1] or ""))
    return code, labels


def loops(sass: str) -> list[Loop]:
    """The innermost loops over tiles, in the code's order: those with matrix products or, where
    other warps start them (Blackwell), those that leave weights in tensor memory.

    A loop is what lies between a label and a later jump back to it.
    """
    code, labels = instructions(sass)
    apart = any(x.root == "STTM" for x in code)
    jumps = _jumps(code, labels)
    spans = {
        (start, end)
        for end, start in jumps
        if start <= end and any(_is_of_tile(x, apart) for x in code[start : end + 1])
    }
    innermost = [
        (start, end)
        for start, end in sorted(spans)
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans)
    ]
    return [_loop(code, start, end, jumps) for start, end in innermost]


def _jumps(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """From which place to which."""
    found = ((i, _TARGET.search(x.operands)) for i, x in enumerate(code) if x.root == "BRA")
    return [(i, labels[x[1]]) for i, x in found if x and x[1] in labels]


def _is_of_tile(instruction: Instruction, apart: bool) -> bool:
    return instruction.root == "STTM" if apart else kind(instruction) == "matrix"


def _is_voted(before: list[Instruction], predicate: str) -> bool:
    """Whether threads have voted on a predicate, of a warp or at a barrier, before all else that
    sets it."""
    among_first = re.compile(rf"(?:[\w.!]+,\s*)?{predicate}\b")
    last = (x for x in reversed(before) if among_first.match(x.operands))
    return bool(predicate) and next(last, _NOTHING).root in ("VOTE", "B2R")


def _loop(code: list[Instruction], start: int, end: int, jumps: list[tuple[int, int]]) -> Loop:
    over = {
        place
        for at, to in jumps
        if start <= at < to <= end and _is_voted(code[start:at], code[at].predicate)
        for place in range(at + 1, to)
    }
    body = [code[place] for place in range(start, end + 1) if place not in over]
    by_kind = collections.Counter(map(kind, body))
    return Loop(
        instructions=len(body),
        matrix_cycles=round(sum(map(matrix_cycles, body))),
        special_cycles=_SPECIAL_CYCLES * by_kind["special"],
        shared_cycles=round(sum(map(shared_cycles, body))),
        products=sum(math.prod(_sizes(x)) for x in body),
        by_kind=dict(by_kind.most_common()),
        sometimes=len(over),
    )


def main_loop(found: list[Loop]) -> Loop | None:
    """The loop over tiles that need no mask: the most products in the fewest instructions."""
    return max(found, key=lambda x: (x.matrix_cycles, -x.instructions), default=None)
