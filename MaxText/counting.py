"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `1,000 files`.

    Args:
      number: how many.
      noun: singular, with a regular plural.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
