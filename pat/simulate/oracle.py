"""The limit: the best schedule that a search with the true lengths finds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pat.simulate.machine import Machine, Requests
from pat.simulate.node import Node, NodeResult, run_schedule
from pat.simulate.stage import StageResult

# Numbers of live requests at which a switch is tried: each this share of the one before.
GRID = 0.85
MAX_SWITCHES = 4
BEAM = 3  # schedules of each length that are continued by another switch
CLOSER = 9  # numbers tried around the best one


@dataclass(frozen=True)
class Oracle:
    """Knows every response's length, tries schedules in the simulator and takes the best of them.

    The schedules tried, for each node by itself:
      - every size from the start, which is set up before the first request and costs nothing, as it does for the
        static arms; and every size by a switch from the smallest before the first token;
      - from each of these, every single switch, to every other size, or a rebalance, when so many requests are left,
        on a grid of such numbers (each 15 % below the one before; all of them up to 7), and around the best one more
        closely;
      - after the best few of those, the best further switch, on the same grid, and so on up to `max_switches`;
      - `handed_in`: the outcomes of other policies on the same requests, so that the oracle is never behind an arm.
    KV follows by the cheaper way.  So it is the least time of these schedules only: the switches happen when a
    request ends, the requests are dealt as the engine deals them, and all ranks of a node are at one size.
    """

    machine: Machine
    max_switches: int = MAX_SWITCHES
    handed_in: Sequence[StageResult] = field(default=())

    def simulate(self, requests: Requests, nodes: int = 1) -> StageResult:
        """The best stage.  A node that ends before the others' best is not searched: it makes no difference."""
        found = []
        for number in range(nodes):
            candidates = [stage.nodes[number] for stage in self.handed_in]
            mine = requests.of_node(number, nodes)
            candidates += [Node(self.machine, mine, tp, number).run_out() for tp in self.machine.tp_sizes]
            found.append(min(candidates, key=lambda result: result.seconds))
        limit = 0.0
        for number in sorted(range(nodes), key=lambda n: -found[n].seconds):
            if found[number].seconds <= limit:
                break
            best = self.search(requests.of_node(number, nodes), number)
            found[number] = min(found[number], best, key=lambda result: result.seconds)
            limit = max(limit, found[number].seconds)
        return StageResult(tuple(found))

    def search(self, requests: Requests, number: int = 0) -> NodeResult:
        """The best schedule of one node."""
        sizes, base, live = self.machine.tp_sizes, self.machine.base, len(requests)
        beam = [_Trial(Node(self.machine, requests, tp, number), live) for tp in sizes]
        # Those that begin as PAT does, with a switch that moves nothing: it deals the requests a bit differently.
        narrow = Node(self.machine, requests, base, number)
        beam += [_Trial(run_schedule(narrow.fork(), [(live, tp)]), live) for tp in sizes if tp != base]
        best = min(beam, key=_seconds)
        for _ in range(self.max_switches):
            tried = sorted(self._continued(beam), key=_seconds)[:BEAM]
            if not tried:
                break
            tried = sorted([*tried, *self._closer(tried[0])], key=_seconds)[:BEAM]
            if tried[0].seconds >= best.seconds and best not in beam:
                break
            best, beam = min(best, tried[0], key=_seconds), tried
        return best.node.run_out()

    def _continued(self, beam: Iterable["_Trial"]) -> Iterator["_Trial"]:
        """Each schedule with one more switch."""
        for trial in beam:
            for left in grid(trial.left):
                for tp in self.machine.tp_sizes:
                    if tp != trial.node.tp or self.machine.predictor.switch.modes(tp, tp):
                        yield _attempt(trial.node, left, tp)

    def _closer(self, trial: "_Trial") -> Iterator["_Trial"]:
        """The same last switch somewhat earlier and later."""
        low, high = int(trial.left * GRID), int(np.ceil(trial.left / GRID))
        for left in np.unique(np.linspace(low, high, CLOSER).round().astype(int)).tolist():
            if 0 < left != trial.left:
                yield _attempt(trial.parent, left, trial.node.tp)


@dataclass(frozen=True, eq=False)
class _Trial:
    """A node after the switches of a schedule, the last of them when `left` requests were live."""

    node: Node
    left: int
    parent: Node | None = None  # before that switch

    @property
    def seconds(self) -> float:
        """Of the stage, without another switch."""
        return self.node.now + self.node.course.seconds


def _attempt(parent: Node, left: int, tp: int) -> _Trial:
    return _Trial(run_schedule(parent.fork(), [(left, tp)]), left, parent)


def _seconds(trial: _Trial) -> float:
    return trial.seconds


def grid(live: int) -> list[int]:
    """Numbers of live requests below `live` at which a switch is tried, descending."""
    numbers, left = [], live - 1
    while left > 0:
        numbers.append(left)
        left = min(left - 1, int(left * GRID))
    return numbers
