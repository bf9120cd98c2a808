"""A generation stage on any number of nodes: tp inside a node; it ends when the last node does."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pat.policy import Policy
from pat.simulate.machine import Machine, Requests
from pat.simulate.node import COARSE, FINE, TAIL, NodeResult, Switch, run_node

# Stages of more requests ask their policies at the coarse pace, so that 65,536 take a minute on one core.
MANY = 8192


@dataclass(frozen=True)
class StageResult:
    nodes: tuple[NodeResult, ...]

    @property
    def seconds(self) -> float:
        return max(node.seconds for node in self.nodes)

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(node.tokens for node in self.nodes)

    @property
    def samples(self) -> int:
        """Requests answered."""
        return sum(len(node.ends) for node in self.nodes)

    @property
    def switches(self) -> list[Switch]:
        return sorted((switch for node in self.nodes for switch in node.switches), key=lambda switch: switch.at_s)

    @property
    def ends(self) -> np.ndarray:
        """Seconds at which the requests ended, ascending."""
        return np.sort(np.concatenate([node.ends for node in self.nodes]))

    @property
    def tail_share(self) -> float:
        """Share of the stage in which at most 10 % of the requests are live."""
        ends = self.ends
        allowed = int(TAIL * len(ends))
        return float(1 - ends[len(ends) - allowed - 1] / ends[-1])

    def live_curve(self, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and the live requests from then on, at most `points` + 1 of them, from 0 to the end."""
        ends = self.ends
        count = len(ends)
        chosen = np.unique(np.linspace(0, count, min(points, count) + 1).round().astype(int))
        return np.concatenate([[0.0], ends])[chosen], count - chosen


def simulate(machine: Machine, policy: Callable[[], Policy], requests: Requests, nodes: int = 1) -> StageResult:
    """One generation stage: `requests` are dealt in turn to the nodes, each with a policy of its own.

    policy: makes a node's policy, with whatever it has observed of earlier iterations.  ValueError when there are
    fewer requests than nodes, or one does not fit the KV capacity.  In a stage of more than MANY requests the policies
    are asked less often (`pat.simulate.node.Pace`).
    """
    pace = COARSE if len(requests) > MANY else FINE
    if len(requests) < nodes:
        raise ValueError(f"{len(requests)} requests for {nodes} nodes: each needs one at least")
    return StageResult(
        tuple(run_node(machine, policy(), requests.of_node(node, nodes), node, pace) for node in range(nodes))
    )
