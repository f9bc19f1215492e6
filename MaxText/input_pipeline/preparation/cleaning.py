"""Repairs text before it is tokenised: `text_cleaner`."""

from collections.abc import Callable

from MaxText.errors import UserError


def text_cleaner(fix_text: bool) -> Callable[[str], str]:
    """A function that gives the text to tokenise for a text that was read.

    Args:
      fix_text: repair broken Unicode with ftfy: text decoded with the wrong encoding, look-alikes
        of quotes and ligatures, line ends; the result is NFC.

    Raises:
      UserError: ftfy is asked for and not installed.
    """
    if not fix_text:
        return _as_it_is
    try:
        import ftfy
    except ImportError as error:
        raise UserError(
            "prepare_fix_text=true needs the package ftfy, which is not installed. Run: pip "
            "install 'MaxText[data]'"
        ) from error
    return ftfy.fix_text


def _as_it_is(text: str) -> str:
    return text
