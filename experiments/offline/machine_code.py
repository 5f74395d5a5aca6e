"""Reads the output of ptxas and nvdisasm for a GPU kernel: registers, spills and innermost loops.

No function here runs a tool. The cycles are a model, not a measurement. They say how long one
warpgroup (four warps, one on each of a multiprocessor's four schedulers) keeps a unit busy during
one iteration of the loop:

- the matrix units multiply and add 2,048 pairs of 16-bit numbers per cycle, 1,024 of tf32 and 4,096
  of 8-bit numbers; the older instructions of one warp (HMMA) reach half of that;
- the special function unit, which computes exp2, takes 8 cycles for one instruction of a warp;
- shared memory delivers 128 bytes per cycle, also to matrix products that read operands from it;
- each scheduler issues one instruction per cycle.

`products_per_cycle` predicts bounds from these. The upper bound is set by the busiest unit: other
warpgroups fill all waits. The lower bound is that of one warpgroup whose matrix units and other
instructions wait for each other. A device lies between.
"""

import collections
import math
import re
from typing import NamedTuple


class Resources(NamedTuple):
    """The resources of one thread or block of a kernel, as printed by `ptxas -v`."""

    registers: int
    stack_bytes: int
    spill_bytes: int  # bytes of spill stores; loads are as many or more
    shared_bytes: int  # static shared memory, without the dynamic part
    warnings: tuple[str, ...]


class Instruction(NamedTuple):
    """One line of machine code: its name, such as `HGMMA.64x128x16.F32.BF16`, its operands, and its
    predicate, such as `P1`."""

    name: str
    operands: str
    predicate: str = ""

    @property
    def root(self) -> str:
        """The name without suffixes."""
        return self.name.split(".")[0]


class MachineLoop(NamedTuple):
    """The figures of one iteration of an innermost loop over tiles. For Blackwell's matrix units,
    sizes and cycles are unknown. `sometimes` counts the instructions that warps may skip by a vote,
    such as the rescaling of sums after a large change of the maximum; no other figure counts
    them."""

    instructions: int
    matrix_cycles: int
    special_cycles: int
    shared_cycles: int
    products: int  # pairs of numbers that are multiplied and added
    by_kind: dict[str, int]  # instructions of each kind
    sometimes: int = 0  # instructions that may be skipped

    @property
    def products_per_cycle(self) -> tuple[float, float]:
        """The least and the greatest number of products per cycle of a multiprocessor."""
        other_cycles = max(self.instructions, self.special_cycles)
        busiest = max(self.matrix_cycles, other_cycles, self.shared_cycles)
        serial = max(self.matrix_cycles + other_cycles, busiest)
        return self.products / serial, self.products / busiest


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
_SHARED_BYTES = 128  # per cycle
_WARPS = 4  # in a warpgroup

_NOTHING = Instruction("", "")

_LINE = re.compile(r"\s+/\*[0-9a-f]{4,6}\*/\s+(?:\{\s*)?(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"\s*(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")


def resources(output: str) -> Resources:
    """Reads the output of `ptxas -v` for one kernel.

    Raises:
        ValueError: the output does not name the registers.
    """
    registers = re.search(r"Used (\d+) registers", output)
    if registers is None:
        raise ValueError(f"expected 'Used … registers' from ptxas -v, got {output.strip()!r}")

    def number(pattern: str) -> int:
        match = re.search(pattern, output)
        return int(match[1]) if match else 0

    return Resources(
        registers=int(registers[1]),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        shared_bytes=number(r"(\d+) bytes smem"),
        warnings=warnings(output),
    )


def warnings(output: str) -> tuple[str, ...]:
    """Returns the distinct warnings of ptxas, and its information that matrix products are
    serialised."""
    texts = re.findall(
        r"^ptxas \w+\s*:\s*(.*Potential Performance Loss.*?)\s*$"
        r"|^.*?\b(?:warning|error)\b\s*:\s*(.*?)\s*$",
        output,
        re.MULTILINE,
    )
    texts = [loss or warning for loss, warning in texts]
    return tuple(dict.fromkeys(texts))


def kind(instruction: Instruction) -> str:
    """Returns the kind of an instruction, such as "matrix" or "wait"."""
    return _KINDS.get(instruction.root, "other")


def _sizes(instruction: Instruction) -> tuple[int, int, int]:
    """Returns rows, columns and depth of a warpgroup's product; zeros for other instructions.

    An HMMA belongs to one warp, so a warpgroup executes four of them.
    """
    if instruction.root not in _PRODUCTS_PER_CYCLE:
        return 0, 0, 0
    wide = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.name)
    narrow = re.search(r"\.(16)(8)(\d+)", instruction.name)  # 16816 is 16 × 8 × 16
    match = wide or narrow
    rows, columns, depth = map(int, match.groups()) if match else (0, 0, 0)
    return rows * (1 if wide else _WARPS), columns, depth


def matrix_cycles(instruction: Instruction) -> float:
    """Returns the cycles in which a warpgroup's instruction occupies the matrix units."""
    products = math.prod(_sizes(instruction))
    if not products:
        return 0.0
    rate = _PRODUCTS_PER_CYCLE[instruction.root]
    return products / (rate / 2 if ".TF32" in instruction.name else rate)


def shared_cycles(instruction: Instruction) -> float:
    """Returns the cycles in which a warpgroup's instruction occupies shared memory."""
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
    """Parses the output of `nvdisasm -c`; returns the instructions, and the index of each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(code)
            continue
        match = _LINE.match(line)
        if match:
            code.append(Instruction(match[2], match[3].strip(), match[1] or ""))
    return code, labels


def loops(sass: str) -> list[MachineLoop]:
    """Returns the innermost loops over tiles, in the code's order: loops with matrix products or,
    if other warps start the products (Blackwell), loops that store weights in tensor memory.

    A loop is the code between a label and a later jump back to it.
    """
    code, labels = instructions(sass)
    in_other_warps = any(x.root == "STTM" for x in code)
    jumps = _jumps(code, labels)
    spans = {
        (start, end)
        for end, start in jumps
        if start <= end and any(_is_of_tile(x, in_other_warps) for x in code[start : end + 1])
    }
    innermost = [
        (start, end)
        for start, end in sorted(spans)
        if not any(
            (inner_start, inner_end) != (start, end) and start <= inner_start and inner_end <= end
            for inner_start, inner_end in spans
        )
    ]
    return [_loop(code, start, end, jumps) for start, end in innermost]


def _jumps(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Returns the jumps as pairs of indices: the jump, and its target."""
    targets = ((i, _TARGET.search(x.operands)) for i, x in enumerate(code) if x.root == "BRA")
    return [(i, labels[x[1]]) for i, x in targets if x and x[1] in labels]


def _is_of_tile(instruction: Instruction, in_other_warps: bool) -> bool:
    return instruction.root == "STTM" if in_other_warps else kind(instruction) == "matrix"


def _is_voted(preceding: list[Instruction], predicate: str) -> bool:
    """Returns whether the last of the `preceding` instructions that sets a predicate is a vote of a
    warp, or of threads at a barrier."""
    sets_predicate = re.compile(rf"(?:[\w.!]+,\s*)?{predicate}\b")
    setters = (x for x in reversed(preceding) if sets_predicate.match(x.operands))
    return bool(predicate) and next(setters, _NOTHING).root in ("VOTE", "B2R")


def _loop(
    code: list[Instruction], start: int, end: int, jumps: list[tuple[int, int]]
) -> MachineLoop:
    skipped = {
        index
        for jump, target in jumps
        if start <= jump < target <= end and _is_voted(code[start:jump], code[jump].predicate)
        for index in range(jump + 1, target)
    }
    body = [code[index] for index in range(start, end + 1) if index not in skipped]
    by_kind = collections.Counter(map(kind, body))
    return MachineLoop(
        instructions=len(body),
        matrix_cycles=round(sum(map(matrix_cycles, body))),
        special_cycles=_SPECIAL_CYCLES * by_kind["special"],
        shared_cycles=round(sum(map(shared_cycles, body))),
        products=sum(math.prod(_sizes(x)) for x in body),
        by_kind=dict(by_kind.most_common()),
        sometimes=len(skipped),
    )


def main_loop(candidates: list[MachineLoop]) -> MachineLoop | None:
    """Returns the loop over tiles without a mask: most products, then fewest instructions."""
    return max(candidates, key=lambda x: (x.matrix_cycles, -x.instructions), default=None)
