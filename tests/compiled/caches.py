"""Caches of tests' own."""

from pathlib import Path

from compiled.weights import cache_folder


def apart(home: Path) -> Path:
    """``home``, for `XDG_CACHE_HOME`: empty but for the kernels, which are the machine's and take long to compile. They
    are linked, because others may be compiling some of them."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (home / "streamengine").mkdir(parents=True)
    (home / "streamengine" / "kernels").symlink_to(kernels)
    return home
