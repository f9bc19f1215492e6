"""Number formats."""

import math

from MaxText.metrics.step_line import format_duration

ABSENT = "-"


def whole(number: float | None) -> str:
    """Formats 12345 as "12,345"."""
    return ABSENT if number is None else f"{number:,.0f}"


def operations(number: float | None) -> str:
    """Formats FLOPs as "1.23e+18"."""
    return ABSENT if number is None else f"{number:.3g}"


def loss(value: float | None) -> str:
    """Formats a loss in nats per token to four decimals."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4f}"


def share(value: float | None) -> str:
    """Formats 0.123 as "12.3 %"."""
    return ABSENT if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def size(num_bytes: float | None) -> str:
    """Formats bytes in the largest fitting binary unit."""
    if num_bytes is None:
        return ABSENT
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def spent_time(seconds: float) -> str:
    """Formats seconds as h:mm:ss, or in seconds below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
