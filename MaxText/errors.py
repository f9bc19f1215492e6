"""The one exception for mistakes that a user can mend: bad keys, missing files, unusable data.

Entry scripts print its message without a traceback and exit with code 2. Everything else is a
bug of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Says what is wrong, where it was set, and what to do. Exit code 2."""

    exit_code = 2
