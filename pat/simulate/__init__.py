"""One generation stage, replayed event by event under a policy and a predictor (pure; the engine's Policy objects).

    machine = Machine(Predictor.load(path), ranks=8, tp_sizes=(1, 2, 4, 8), kv_tokens=400_000)
    result = simulate(machine, lambda: Static(2), Requests.of([100, 2000, 512], prompt=64, cap=4096))

All requests arrive at once and are dealt in turn to nodes and replicas.  A replica admits them first come, first
served as its KV capacity allows, prefills before it decodes, and decodes all that are admitted together.
"""

from pat.simulate.machine import Machine, Requests
from pat.simulate.node import NodeResult, Switch, run_node
from pat.simulate.oracle import Oracle
from pat.simulate.stage import StageResult, simulate

__all__ = ["Machine", "NodeResult", "Oracle", "Requests", "StageResult", "Switch", "run_node", "simulate"]
