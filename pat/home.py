"""A home folder that can be written to: Ray, Hugging Face's datasets and compilers of kernels keep files there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def ensure() -> None:
    """Where HOME cannot be written to, set it to a folder of this user's below the temporary one, and say so.

    Raises PermissionError if that belongs to another user.
    """
    home = Path.home()
    if os.access(home, os.W_OK | os.X_OK):
        return
    folder = Path(tempfile.gettempdir(), f"pat-home-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"HOME={home} cannot be written to, and {folder} is another user's: set HOME")
    os.environ["HOME"] = str(folder)
    print(f"HOME={home} cannot be written to: caches go to {folder}", flush=True)
