"""PAT as a plugin of verl 0.9.1 (entry point ``verl.plugins``): the rollout ``pat``, and the platform ``cpu``.

verl imports this module in every process of a job. verl hides errors of entry points; a job that must not go on
without PAT also names it in ``VERL_USE_EXTERNAL_MODULES=pat.rl.plugin``, whose errors end the job.
"""

import os

from pat.rl import platform
from pat.rl import verl_api as verl

ROLLOUT = "pat"  # actor_rollout_ref.rollout.name


def _replica():
    from pat.rl.rollout import Replica

    verl.check()
    return Replica


platform.register()
if os.environ.get("VERL_PLATFORM") == "cpu":
    platform.wrap()
verl.RolloutReplicaRegistry.register(ROLLOUT, _replica)
verl.ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "pat.rl.rollout.Adapter"
