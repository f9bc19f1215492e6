"""Numbers in sentences."""


def pluralize(number: int, noun: str) -> str:
    """Returns `1 file`, `2 files`, `1,000 files`; `noun` is a regular singular."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
