"""Stand-ins for packages without a CPU wheel, and what makes transformers see them late (transformers 5.10)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
BACKEND = "torchvision"


def needed() -> bool:
    """Whether SGLang imports a package that this environment lacks for want of a CPU wheel."""
    return not all(importlib.util.find_spec(name) for name in ("sgl_kernel", BACKEND))


def add() -> None:
    """Make SGLang importable: the stand-ins, last on the path.

    Raises ImportError if transformers remembers in a way unknown to PAT that there was no torchvision.
    """
    if needed():
        sys.path.append(str(STUBS))
        if "transformers" in sys.modules:
            _look_again()


def _look_again() -> None:
    """Make transformers, imported before, forget that there was no torchvision.

    It notes what each of its lazy modules lacks when that is made, and puts a placeholder under each such name that
    was asked for. SGLang registers image processors under these names, though it never calls them for text.
    """
    from transformers.utils import import_utils

    try:
        for available in (import_utils.is_torchvision_available, import_utils.is_torchvision_v2_available):
            available.cache_clear()
        lazy = [module for module in list(sys.modules.values()) if isinstance(module, import_utils._LazyModule)]
        for module in lazy:
            for name, lacking in list(module._object_missing_backend.items()):
                left = [backend for backend in lacking if backend != BACKEND]
                if left == lacking:
                    continue
                module._object_missing_backend[name] = left
                if not left:
                    del module._object_missing_backend[name]
                vars(module).pop(name, None)
    except AttributeError as error:
        raise ImportError(
            f"run `from pat import Engine` before transformers is imported: its internals are not those known ({error})"
        ) from error
