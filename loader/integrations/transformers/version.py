"""Version: whether the framework that is installed is one that this door fits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from loader.errors import UnsupportedError

PACKAGE = "transformers"
MAJOR = 5
INSTALL = f"pip install '{PACKAGE}>={MAJOR},<{MAJOR + 1}'"


def require_version() -> str:
    """The installed version; :class:`UnsupportedError` where there is none or another major."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise UnsupportedError(
            "Transformers is not installed", expected=INSTALL, found="no such package"
        ) from None
    if found.split(".")[0] != str(MAJOR):
        raise UnsupportedError(
            "this version of Transformers is not supported",
            expected=f"{MAJOR}.x: {INSTALL}",
            found=found,
        )
    return found
