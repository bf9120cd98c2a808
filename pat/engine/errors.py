"""What can go wrong with an engine, for its callers."""


class SwitchError(RuntimeError):
    """A switch did not end, and the engine cannot go on."""


class EngineDead(SwitchError):
    """The engine cannot answer any more. The message says which of its processes ended, and how."""


class SwitchUndone(RuntimeError):
    """A switch failed before it took effect: generation goes on in the old layout. The message says why."""
