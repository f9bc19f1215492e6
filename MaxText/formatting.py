"""Text tables of at most 110 columns, and formats of numbers."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

WIDTH = 110  # characters of a line
ABSENT = "-"


def parameter_table(
    parameters: Mapping[str, Any], sharding_of: Callable[[str], str] | None = None
) -> str:
    """Returns a table of parameters; repeated layers share a row.

    Args:
      parameters: Name -> an object with `shape` and `dtype`. Those with an `update_rule` are
        marked: no optimizer trains them.
      sharding_of: Name -> a description of the parameter's sharding, for one more column.
    """
    groups: dict[tuple[str, int, str], list[str]] = {}
    for name, parameter in parameters.items():
        pattern = "/".join("*" if part.isdigit() else part for part in name.split("/"))
        key = (pattern, len(parameter.shape), parameter.dtype.name)
        groups.setdefault(key, []).append(name)

    def size(names: Iterable[str]) -> int:
        return sum(math.prod(parameters[name].shape) for name in names)

    num_parameters = size(parameters)
    num_bytes = sum(size(names) * parameters[names[0]].dtype.itemsize for names in groups.values())
    header = ["parameter", "shape", "format", "count", "share"]
    rows = []
    for (pattern, _, dtype), names in groups.items():
        count = size(names)
        name = names[0] if len(names) == 1 else f"{pattern}  x{len(names)}"
        if getattr(parameters[names[0]], "update_rule", None) is not None:
            name += " (not trained)"
        # Of equal rank: "64 x 8..24".
        sizes = zip(*(parameters[name].shape for name in names), strict=True)
        ranges = [
            f"{min(axis_sizes)}..{max(axis_sizes)}"
            if len({*axis_sizes}) > 1
            else str(axis_sizes[0])
            for axis_sizes in sizes
        ]
        shape = " x ".join(ranges) or "scalar"
        rows.append([name, shape, dtype, f"{count:,}", share(count, num_parameters)])
        if sharding_of is not None:
            rows[-1].append(" or ".join(dict.fromkeys(map(sharding_of, names))))
    if sharding_of is not None:
        header.append("split over")
    total = ["total", "", "", f"{num_parameters:,}", "100.0%"]
    table = format_table(header, rows, total, right=(3, 4))
    return f"{table}\n{num_parameters / 1e9:.3f} billion parameters, {byte_count(num_bytes)}"


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    right: Collection[int] | None = None,
    max_width: int | None = WIDTH,
) -> str:
    """Returns aligned columns, with rules around the rows.

    Args:
      header: Titles of the columns.
      rows: Cells of each row; a row may have fewer than the header.
      total: The last row, below a rule of its own.
      right: The right-aligned columns, by default all but the first.
      max_width: Characters of a line; None for no limit.
    """
    right = range(1, len(header)) if right is None else right
    table = [header, *rows]
    if total is not None:
        table.append(total)
    widths = [
        max((len(row[column]) for row in table if column < len(row)), default=0)
        for column in range(len(header))
    ]
    if max_width is not None:
        # Truncates long names at the start: their ends say more.
        width_of_others = sum(widths[1:]) + 2 * (len(widths) - 1)
        widths[0] = max(min(widths[0], max_width - width_of_others), 12)
    lines = []
    for name, *numbers in table:
        if len(name) > widths[0]:
            name = "..." + name[-(widths[0] - 3) :]
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip([name, *numbers], widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip()[:max_width])
    rule = "-" * max(map(len, lines))
    body = lines[1:] if total is None else [*lines[1:-1], rule, lines[-1]]
    return "\n".join([lines[0], rule, *body])


def share(part: float, total: float) -> str:
    """Returns a share as a percentage, such as "12.3%"."""
    return f"{100 * part / max(total, 1):.1f}%"


def short_count(number: float, _position: float | None = None) -> str:
    """Formats 2500000 as "2.5M"; has the signature of a matplotlib formatter."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        # 999,600 would round to 1000 of the smaller unit.
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def format_duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


# Units of time, largest first: seconds, name.
TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_YEAR = 365.25 * 86400


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the largest unit at most half of a time, or seconds."""
    return next((unit for unit in TIME_UNITS if seconds >= 2 * unit[0]), TIME_UNITS[-1])


def short_time(seconds: float) -> str:
    """Formats a time in a common unit: "8.6 ms", "10.2 minutes"."""
    size, unit = (1e-3, "ms") if seconds < 1 else time_unit(seconds)
    if seconds >= 2 * _YEAR:
        size = _YEAR
        unit = "years"
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def byte_count(number: int) -> str:
    """Formats bytes, exact and in the largest binary unit of at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number:,} bytes ({number / size:,.2f} {unit})"
    return f"{number:,} bytes"


def derived_quantities(rows: Iterable[tuple[str, str, str, Any]]) -> str:
    """Formats rows as "name = formula = numbers = value", without blanks."""
    lines = []
    for name, formula, numbers, value in rows:
        parts = [part for part in (formula, numbers, _number(value)) if part]
        line = f"{name} = {parts[0]}"
        for part in parts[1:]:
            if len(line) + 3 + len(part) > WIDTH:
                lines.append(line)
                line = f"    = {part}"
            else:
                line += f" = {part}"
        lines.append(line)
    return "\n".join(lines)


def _number(value: Any) -> str:
    """Formats a value: integers exactly, floats with 4 digits or as integers."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _format(template: str, number: float | None, factor: float = 1) -> str:
    """Formats a number, times a factor; ABSENT if it is unknown or not finite."""
    if number is None or not math.isfinite(number):
        return ABSENT
    return template.format(number * factor)


format_whole = functools.partial(_format, "{:,.0f}")  # 12,345
format_operations = functools.partial(_format, "{:.3g}")  # FLOPs, as 1.23e+18
format_loss = functools.partial(_format, "{:.4f}")  # nats per token
format_share = functools.partial(_format, "{:.1f} %", factor=100)  # 0.123 as 12.3 %


def format_size(num_bytes: float | None) -> str:
    """Formats bytes in the largest fitting binary unit."""
    if num_bytes is None:
        return ABSENT
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_time(seconds: float) -> str:
    """Formats seconds as h:mm:ss, or in seconds below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def pluralize(number: int, noun: str) -> str:
    """Returns `1 file`, `1,000 files`, from a regular singular noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
