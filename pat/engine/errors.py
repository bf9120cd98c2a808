"""What can go wrong with a switch, for callers of the engine."""


class SwitchError(RuntimeError):
    """A switch did not end and the engine cannot go on."""


class SwitchUndone(RuntimeError):
    """A switch failed before it took effect: generation goes on in the old layout. The message says why."""
