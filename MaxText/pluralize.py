"""A number with its noun, for messages."""


def pluralize(number: int, noun: str) -> str:
    """Returns "1 file" or "1,000 files" from a number and a regular singular noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
