"""New weights in a scheduler process: loaded in the base layout only, and by all ranks of a replica or by none."""

from __future__ import annotations

import torch.distributed as dist

from pat.engine import sglang_api as sg
from pat.engine.faults import Faults
from pat.engine.settings import Settings


def from_disk(settings: Settings, original, updater, *args, **kwargs) -> tuple[bool, str]:
    """Hook around SGLang's ``WeightUpdater.update_weights_from_disk``: (whether all went well, what did not).

    On a failure SGLang would load "the original weights" again, from the path of the new ones, and end the process
    when that fails as well. Only a replica's leader answers, so the others tell it.
    """
    parallel = sg.get_parallel()
    if parallel.tp_size != settings.base:
        raise AssertionError(f"weights are loaded at tp {settings.base} only, not at tp {parallel.tp_size}")
    faults = Faults(settings.path, dist.get_rank())
    done = _attempt(original, updater, *args, **kwargs, weight_name_filter=lambda name: _strike(faults, name))
    answers = [done] * parallel.tp_size
    if parallel.tp_size > 1:
        dist.all_gather_object(answers, done, group=parallel.tp_group.cpu_group)
    failed = [answer for answer in answers if not answer[0]]
    return failed[0] if failed else done


def _attempt(original, *args, **kwargs) -> tuple[bool, str]:
    try:
        done, message = original(*args, **kwargs)
    except Exception as error:
        first = error.__context__ or error  # what failed before SGLang loaded again
        done, message = False, f"{type(first).__name__}: {first}"
    # SGLang says that it rolls back, and loads the new weights once more.
    return done, message if done else f"rank {dist.get_rank()}: {message.splitlines()[0].rstrip('.')}"


def _strike(faults: Faults, name: str) -> bool:
    """Takes every tensor. A fault in the phase "load NAME" strikes there, when others have been written."""
    faults.strike(f"load {name}")
    return True
