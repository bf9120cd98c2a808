"""One node's generation stage under a policy, event by event."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat.layout import deal, rebalance
from pat.policy import Decision, Live, Policy, RolloutState
from pat.simulate.course import Course
from pat.simulate.machine import Machine, Requests

# The policy is asked as the engine's controller asks it: when something finished, and every 32 steps of all replicas
# together (pat.engine.controller.STEPS_BETWEEN_DECISIONS, which is not imported: it comes with the engine).
STEPS_BETWEEN_DECISIONS = 32
TAIL = 0.1  # "the tail" is when at most this share of the requests is live


class Pace(NamedTuple):
    """How much less often than the engine's controller a policy is asked, or a decision would cost more than all else.

    Asked when at least `live` of the live requests have finished since (one at least, so that below 1 / live requests
    nothing is skipped), or after `steps` of the steps made so far (32 at least).
    """

    live: float
    steps: float


FINE = Pace(live=0.02, steps=0.05)
COARSE = Pace(live=0.08, steps=0.25)


class Switch(NamedTuple):
    """One change of tp of one node. at_s, cost_s: seconds. predicted_*: what the policy expected, if it did."""

    node: int
    at_s: float
    tp_from: int
    tp_to: int
    unfinished: int
    kv: str
    cost_s: float
    predicted_saving_s: float | None
    predicted_cost_s: float | None


@dataclass(frozen=True)
class NodeResult:
    """ends: (n,) seconds at which each request ended, in the order of the requests."""

    start_tp: int
    ends: np.ndarray
    tokens: int
    switches: tuple[Switch, ...]

    @property
    def seconds(self) -> float:
        return float(self.ends.max())


class Node:
    """A node in the middle of its stage.  It begins at `tp`, set up before the first request arrives."""

    def __init__(self, machine: Machine, requests: Requests, tp: int, number: int = 0) -> None:
        self.machine, self.requests, self.tp, self.number = machine, requests, tp, number
        self.start_tp = tp
        most = int((requests.prompt + requests.response).max())
        if most > machine.capacity(machine.base):
            raise ValueError(f"a request of {most} tokens does not fit kv_tokens = {machine.kv_tokens}")
        n = len(requests)
        self.now = 0.0  # seconds at which the present course began
        self.made = 0.0  # decode steps of earlier courses
        self.shown = 0.0  # those of the present one that the policy knows of
        self.switches: list[Switch] = []
        self.ends = np.zeros(n)
        self.generated = np.zeros(n, np.int64)  # when the present course began
        replicas = machine.ranks // tp
        self.queues: Sequence[Sequence[int]] = [range(replica, n, replicas) for replica in range(replicas)]
        self.course = self._course(np.zeros(n, bool))

    def _course(self, in_kv: np.ndarray) -> Course:
        left = self.requests.response - self.generated
        held = self.requests.prompt + self.generated
        return Course(self.machine, self.tp, self.queues, held, left, in_kv, self.requests)

    def state(self, moment: float) -> RolloutState:
        """What the policy sees `moment` seconds into the course: no response's length."""
        generated = self.generated + self.course.gained(moment)
        live = generated < self.requests.response
        prompts, sofar = self.requests.prompt.tolist(), generated.tolist()
        return RolloutState(
            tp=self.tp,
            replicas=tuple(tuple(Live(prompts[i], sofar[i]) for i in queue if live[i]) for queue in self.queues),
            cap=self.requests.cap,
            switches=sum(switch.tp_from != switch.tp_to for switch in self.switches),
            switch_s=sum(switch.cost_s for switch in self.switches),
            elapsed_s=self.now + moment,
        )

    def show_steps(self, moment: float, state: RolloutState, policy: Policy) -> None:
        """Tell the policy what decode steps took since it was told last: each as one would take in this state."""
        held = [[request.prompt + request.generated for request in replica] for replica in state.replicas if replica]
        steps = int(self.course.steps(moment) - self.shown) // max(len(held), 1)
        if not steps:
            return
        self.shown += steps * len(held)
        batch, context = np.array([len(each) for each in held]), np.array([sum(each) for each in held])
        seconds = self.machine.predictor.decode.seconds(state.tp, batch, context)
        policy.observe_steps(state.tp, *(np.tile(each, steps) for each in (batch, context, seconds)))

    def switch(self, moment: float, decision: Decision) -> None:
        """Change to decision.tp once the steps in progress at that moment have ended, if anything is left then.

        Nobody generates while it lasts; then the unfinished requests go on, dealt anew, or, where decision.tp is the
        present size, with as few as it takes moved to even the counts.  Recomputation gives no
        token here, although the engine's does: what it takes is in the cost.
        """
        stopped, gained, in_kv = self.course.stop(moment)
        generated = self.generated + gained
        ended = generated == self.requests.response
        unfinished = np.flatnonzero(~ended)
        if not len(unfinished):
            return
        held = self.requests.prompt + generated
        kept = in_kv & ~ended
        queues, elsewhere = self._dealt(decision.tp, unfinished, kept, held)
        moved = kept & elsewhere
        cost, kv = self.machine.switch_s(self.tp, decision.tp, int(moved.sum()), int(held[moved].sum()), decision.kv)
        self._keep_ends(ended)
        at = self.now + stopped
        self.switches.append(
            Switch(self.number, at, self.tp, decision.tp, len(unfinished), kv, cost, decision.saving_s, decision.cost_s)
        )
        self.made += self.course.steps(moment)
        self.now, self.tp, self.generated = at + cost, decision.tp, generated
        self.queues, self.shown = queues, 0.0
        self.course = self._course(kept)

    def _dealt(
        self, tp: int, unfinished: np.ndarray, kept: np.ndarray, held: np.ndarray
    ) -> tuple[list[list[int]], np.ndarray]:
        """The queues of the replicas at `tp`, and which requests (n,) leave the replica where they are."""
        live = set(unfinished.tolist())
        present = [(i, replica) for replica, queue in enumerate(self.queues) for i in queue if i in live]
        order, owner = (list(each) for each in zip(*present, strict=True))
        replicas = self.machine.ranks // tp
        if tp == self.tp:
            target = rebalance(owner, np.where(kept, held, 0)[order].tolist(), replicas)
        else:
            target = deal(held[order].tolist(), replicas)
        queues: list[list[int]] = [[] for _ in range(replicas)]
        elsewhere = np.zeros(len(held), bool)
        for i, old, new in zip(order, owner, target, strict=True):
            queues[new].append(i)
            elsewhere[i] = tp != self.tp or old != new
        return queues, elsewhere

    def _keep_ends(self, ended: np.ndarray) -> None:
        new = ended & (self.course.finish > -np.inf)
        self.ends[new] = self.now + self.course.finish[new]

    def run_out(self) -> NodeResult:
        """Let the present course end."""
        ends = self.ends.copy()
        new = self.course.finish > -np.inf
        ends[new] = self.now + self.course.finish[new]
        return NodeResult(self.start_tp, ends, self.requests.tokens, tuple(self.switches))

    def fork(self) -> "Node":
        """A copy that goes its own way from here."""
        copy = object.__new__(Node)
        copy.__dict__.update(self.__dict__)
        copy.switches, copy.ends = list(self.switches), self.ends.copy()
        return copy


def run_node(machine: Machine, policy: Policy, requests: Requests, number: int = 0, pace: Pace = FINE) -> NodeResult:
    """One stage of one node under `policy`, which is asked before the first request, and as the engine asks it.

    What it wants before there is a request is set up beforehand, off the clock, as at the engine's begin_iteration.
    ValueError when a request does not fit the KV capacity, or the predictor lacks what a switch costs.
    """
    nobody = tuple(() for _ in range(machine.ranks // machine.base))
    before = policy.decide(RolloutState(machine.base, nobody, requests.cap, 0, 0.0, 0.0))
    node = Node(machine, requests, before.tp, number)
    moment: float | None = 0.0
    while moment is not None:
        live, steps, course = node.course.live(moment), node.course.steps(moment), node.course
        state = node.state(moment)
        node.show_steps(moment, state, policy)
        decision = policy.decide(state)
        if decision.changes(node.tp):
            node.switch(moment, decision)
            if node.course is not course:  # else all requests ended with the step
                moment, steps = 0.0, 0.0
                if node.course.live(0.0) < live:  # some ended with the step, which the policy has not seen
                    continue
        moment = _next(node, moment, live, steps, pace)
    return node.run_out()


def _next(node: Node, moment: float, live: int, steps: float, pace: Pace) -> float | None:
    """When the policy is asked next, given that it saw `live` requests after `steps`; None: not before the end."""
    course = node.course
    fewer = live - max(1, int(pace.live * live))
    more = max(STEPS_BETWEEN_DECISIONS, pace.steps * (node.made + steps))
    following = min(course.when_live(fewer), course.when_steps(steps + more))
    return max(following, moment) if following < course.seconds else None


def run_schedule(node: Node, changes: Sequence[tuple[int, int]]) -> Node:
    """`node` after the changes (live, tp): once at most so many are live, to `tp`, or a rebalance if it is there."""
    for live, tp in changes:
        if tp != node.tp or node.machine.predictor.switch.modes(tp, tp):
            node.switch(node.course.when_live(live), Decision(tp))
    return node
