"""PAT: adaptive tensor parallelism for the generation stage of synchronous RLHF."""

__all__ = ["Engine"]


def __getattr__(name: str):
    # Not imported with the package: SGLang takes seconds to import and not every command needs it.
    if name == "Engine":
        from pat.engine.api import Engine

        return Engine
    raise AttributeError(f"module 'pat' has no attribute {name!r}")
