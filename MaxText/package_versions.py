"""Refuses installed packages of versions that are known to break this program.

pyproject.toml has the same bounds. But a package that is installed later may replace a version, and
then the first sign would be an AttributeError in the middle of a run.
"""

import importlib.metadata
import re

from MaxText.errors import UserError

# Package -> the first release that breaks, and why. tests/house/test_packaging.py compares these
# with pyproject.toml.
FIRST_BROKEN = {
    "jax": ("0.13", "each minor release of jax removes functions"),
    "orbax-checkpoint": ("0.13", "its API for checkpoints is experimental until 1.0"),
}


def check_versions() -> None:
    """Raises UserError if an installed package is too new; ignores packages that are absent."""
    for package, (first_broken, reason) in FIRST_BROKEN.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # the import says so
        if _release(version) >= _release(first_broken):
            raise UserError(
                f"{package} {version} is installed, and this version of jaxpretrain needs one "
                f"before {first_broken}: {reason}.\n"
                f"  What to do: pip install '{package}<{first_broken}', or a newer jaxpretrain."
            )


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without the suffix of a pre-release: 1.0.0rc1 is (1, 0, 0).

    So a pre-release of a version that breaks the program is refused, too.
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
