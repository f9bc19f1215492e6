"""What is printed before training: the parameters, and how the derived quantities came about."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_WIDTH = 110


def parameter_table(
    parameters: Mapping[str, Any], sharding_of: Callable[[str], str] | None = None
) -> str:
    """Every parameter with its shape, format, size and share; repeated layers on one row.

    Args:
      parameters: name ("layers/0/mlp/wi") -> anything with .shape and .dtype.
      sharding_of: name -> how it is split over devices; adds a column.

    Returns:
      Lines of at most 110 characters.
    """
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, parameter in parameters.items():
        key = (_pattern(name), tuple(parameter.shape), np.dtype(parameter.dtype).name)
        groups.setdefault(key, []).append(name)
    num_parameters = sum(math.prod(shape) * len(names) for (_, shape, _), names in groups.items())
    num_bytes = sum(
        math.prod(shape) * len(names) * parameters[names[0]].dtype.itemsize
        for (_, shape, _), names in groups.items()
    )
    header = ["parameter", "shape", "format", "count", "share"]
    rows = []
    for (pattern, shape, dtype), names in groups.items():
        count = math.prod(shape) * len(names)
        name = names[0] if len(names) == 1 else f"{pattern}  x{len(names)}"
        dims = " x ".join(map(str, shape)) or "scalar"
        share = f"{100 * count / max(num_parameters, 1):.1f}%"
        rows.append([name, dims, dtype, f"{count:,}", share])
        if sharding_of is not None:
            rows[-1].append(sharding_of(names[0]))
    if sharding_of is not None:
        header.append("split over")
    total = ["total", "", "", f"{num_parameters:,}", "100.0%"]
    lines = _aligned([header, *rows, total], right=(3, 4))
    rule = "-" * min(max(map(len, lines)), _WIDTH)
    return "\n".join(
        [
            *(lines[0], rule, *lines[1:-1], rule, lines[-1]),
            f"{num_parameters / 1e9:.3f} billion parameters, {num_bytes:,} bytes "
            f"({num_bytes / 2**30:.3f} GiB)",
        ]
    )


def _pattern(name: str) -> str:
    return "/".join("*" if part.isdigit() else part for part in name.split("/"))


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(5)]
    # Long names give way first: their end tells more than their beginning.
    others = sum(widths[1:]) + 2 * 5 + max((len(row[5]) for row in rows if len(row) > 5), default=0)
    widths[0] = max(min(widths[0], _WIDTH - others), 12)
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row[:5]):
            if column == 0 and len(cell) > widths[0]:
                cell = "..." + cell[-(widths[0] - 3) :]
            cells.append(
                cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            )
        lines.append("  ".join([*cells, *row[5:]]).rstrip()[:_WIDTH])
    return lines


def derived_quantities(rows: Iterable[tuple[str, str, str, Any]]) -> str:
    """Lines "name = formula = numbers = value", such as

        tokens per step = per_device_batch_size x devices x length = 12 x 1 x 2048 = 24,576

    Args:
      rows: (name, formula in words, the same with numbers, value). Empty formulas are left out.

    Returns:
      Lines of at most 110 characters; longer ones are continued at an equals sign.
    """
    lines = []
    for name, formula, numbers, value in rows:
        parts = [part for part in (formula, numbers, _number(value)) if part]
        line = f"{name} = {parts[0]}"
        for part in parts[1:]:
            if len(line) + 3 + len(part) > _WIDTH:
                lines.append(line)
                line = f"    = {part}"
            else:
                line += f" = {part}"
        lines.append(line)
    return "\n".join(lines)


def _number(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
