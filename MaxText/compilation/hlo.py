"""Parses a compiled program: loops, collectives, arrays.

The text is XLA's HLO as returned by Compiled.as_text. Its format is not stable, so unknown syntax
is skipped.
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "bf16": 16,
    "f16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_INDEX = re.compile(r"\bindex=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
# Aliases of existing arrays, or no arrays.
_NO_ARRAY = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "constant",
    "opt-barrier",
    "call",
    "after-all",
    "partition-id",
    "iota",
    "copy-start",
)


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str  # type of the result, e.g. f32[8,128]{1,0}
    kind: str  # e.g. all-gather
    arguments: str  # the text after the opening parenthesis: operands and attributes


class Collective(NamedTuple):
    """Communication of one step by operation kind, over all iterations."""

    kind: str
    count: int
    # Of results on one device. If a result contains the operand, the larger of the two.
    num_bytes: int


class LargeBuffer(NamedTuple):
    """An array that a step creates on a device."""

    num_bytes: int  # unpadded
    shape: str
    made_by: str  # operation and source line
    count: int  # times that it is created


class HloModule:
    """A compiled program, parsed from its text."""

    def __init__(self, text: str):
        self._tables = _source_tables(text)
        self._computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self._computations.setdefault(match[2], [])
                self._entry = match[2] if match[1] else self._entry
            elif line == "}":
                current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                name, shape, kind, arguments = match.groups()
                current.append(Instruction(name, shape, kind, arguments))
        self.has_unknown_loops = False
        self._runs: dict[str, int] = collections.defaultdict(int)
        self._in_fusion: set[str] = set()
        self._count_runs(self._entry, 1, False)

    def _count_runs(self, name: str, times: int, in_fusion: bool) -> None:
        """Adds `times` runs of a computation, and those of the computations that it calls."""
        self._runs[name] += times
        if in_fusion:
            self._in_fusion.add(name)
        for instruction in self._computations.get(name, ()):
            for role, called in _called(instruction):
                if called not in self._computations:
                    continue
                trips = self._trip_count(instruction) if role in ("body", "condition") else 1
                inside = in_fusion or role == "to_apply" or instruction.kind == "fusion"
                self._count_runs(called, times * trips, inside)

    def _trip_count(self, loop: Instruction) -> int:
        if match := _TRIP_COUNT.search(loop.arguments):
            return int(match[1])
        # On TPU, without an annotation: the only constant that the counter is compared with.
        called = dict(_called(loop))
        condition = self._computations.get(called.get("condition", ""), [])
        bounds = [value for i in condition if (value := _integer(i)) is not None]
        if len(bounds) == 1:
            return -(-bounds[0] // self._counter_step(condition, called.get("body", "")))
        self.has_unknown_loops = True
        return 1

    def _counter_step(self, condition: Sequence[Instruction], body: str) -> int:
        """Returns what is added to the counter, 2 for products in windows."""
        index = [_INDEX.search(i.arguments) for i in condition if i.kind == "get-tuple-element"]
        lines = {i.name: i for i in self._computations.get(body, ())}
        results = _operands([*lines.values()][-1]) if lines else []
        at = int(index[0][1]) if len(index) == 1 and index[0] else len(results)
        added = _operands(lines[results[at]]) if at < len(results) and results[at] in lines else ()
        steps = (_integer(lines[name]) for name in added if name in lines)
        return next(filter(None, steps), 1)

    def executed(self, in_fusions: bool = True) -> Iterator[tuple[str, int, Instruction]]:
        """Yields the instructions of a step, with their computation and count."""
        for computation, times in self._runs.items():
            if computation in self._in_fusion and not in_fusions:
                continue
            for instruction in self._computations.get(computation, ()):
                yield computation, times, instruction

    @property
    def num_loops(self) -> int:
        """Number of while loops, nested ones included."""
        return sum(i.kind == "while" for lines in self._computations.values() for i in lines)

    def collectives(self) -> list[Collective]:
        """Returns the communication of a step by kind, most bytes first."""
        totals: dict[str, list[int]] = {}
        channels: set[str] = set()
        for computation, times, instruction in self.executed():
            kind = instruction.kind.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            # TPU's reduce-scatter is a fusion around an all-reduce that keeps a part of it.
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            # TPU repeats a collective in the fusions that overlap it. Outside of fusions, those of
            # jax.shard_map share a channel.
            elif channel := _CHANNEL.search(instruction.arguments):
                if channel[1] in channels and computation in self._in_fusion:
                    continue
                channels.add(channel[1])
            size = max((size for size, _ in _arrays(instruction.shape)), default=0)
            total = totals.setdefault(kind, [0, 0])
            total[0] += times
            total[1] += times * size
        rows = [Collective(kind, count, size) for kind, (count, size) in totals.items()]
        return sorted(rows, key=lambda row: -row.num_bytes)

    def largest_arrays(self, number: int) -> list[LargeBuffer]:
        """Returns the largest arrays in main memory, not all live at once."""
        counts: collections.Counter[tuple[int, str, str]] = collections.Counter()
        for _, _, instruction in self.executed(in_fusions=False):
            kind = instruction.kind
            if kind not in _NO_ARRAY and not kind.endswith(("-done", "-update")):
                made_by = self._made_by(instruction)
                counts.update((*array, made_by) for array in _arrays(instruction.shape))
        rows = [LargeBuffer(*key, count) for key, count in counts.items()]
        return sorted(rows, key=lambda row: -row.num_bytes)[:number]

    def _made_by(self, instruction: Instruction) -> str:
        name = instruction.kind
        if named := _OP_NAME.search(instruction.arguments):
            name = named[1].replace("\\", "").removeprefix("jit(train_step)/")
        frame = _FRAME.search(instruction.arguments)
        source_line = self._tables.get(frame[1], "") if frame else ""
        return f"{name} ({source_line})" if source_line else name


def _integer(instruction: Instruction) -> int | None:
    digits = instruction.arguments.partition(")")[0]
    is_scalar = instruction.kind == "constant" and re.match(r"[su]32\[\]", instruction.shape)
    return int(digits) if is_scalar and digits.isdigit() else None


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.arguments.partition(")")[0])


def _called(instruction: Instruction) -> Iterator[tuple[str, str]]:
    yield from _CALLED.findall(instruction.arguments)
    if match := _BRANCHES.search(instruction.arguments):
        for name in match[1].split(","):
            yield "branch", name.strip().lstrip("%")


def _arrays(shape: str) -> Iterator[tuple[int, str]]:
    """Yields (bytes, shape without layout) of each array in main memory."""
    for kind, sizes, layout in _ARRAY.findall(shape):
        if kind in _BITS and not re.search(r"S\([1-9]", layout):
            count = math.prod(int(size) for size in sizes.split(",") if size)
            yield count * _BITS[kind] // 8, f"{kind}[{sizes}]"


def _source_tables(text: str) -> Mapping[str, str]:
    """Maps a stack frame id to "file:line" of its innermost call."""

    def rows(name: str, pattern: str) -> list[Any]:
        table = text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
        return re.findall(pattern, table, re.MULTILINE)

    files = dict(rows("FileNames", r'^(\d+) "(.*)"$'))
    source_lines = {
        number: f"{_shortened(files.get(file, ''))}:{line}"
        for number, file, line in rows(
            "FileLocations", r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)"
        )
    }
    frames = rows("StackFrames", r"^(\d+) \{file_location_id=(\d+)")
    return {frame: source_lines.get(source_line, "") for frame, source_line in frames}


def _shortened(path: str) -> str:
    _, package, path_in_package = path.rpartition("/MaxText/")
    return f"MaxText/{path_in_package}" if package else path.rpartition("site-packages/")[2]
