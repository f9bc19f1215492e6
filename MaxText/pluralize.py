"""Numbers in sentences."""


def pluralize(number: int, noun: str) -> str:
    """Returns `1 file`, `1,000 files`, from a regular singular noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
