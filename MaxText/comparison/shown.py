"""How a comparison looks as text: tables of aligned columns, and numbers in few characters."""

from collections.abc import Sequence

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines: the first column to the left, the others to the right, a rule between."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def count(number: float) -> str:
    """1377408 as 1.377M; numbers below 10,000 in full."""
    if number < 1e4:
        return f"{number:,.0f}"
    size, suffix = next((size, suffix) for size, suffix in _LARGE if number >= size)
    return f"{number / size:.4g}{suffix}" if number < 1e15 else f"{number:.4g}"


def optional(number: float | None, pattern: str) -> str:
    """A number by a format pattern, or a dash where there is none."""
    return "-" if number is None else format(number, pattern)
