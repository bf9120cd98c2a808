"""When the policy is asked, what it sees, and what becomes of its answer; the engine is a script."""

import asyncio
import threading

import numpy as np
import pytest

from pat.engine import controller as module
from pat.engine.board import STEP
from pat.engine.controller import STEPS_BETWEEN_DECISIONS, Controller
from pat.engine.errors import SwitchError, SwitchUndone
from pat.layout import Layout
from pat.policy import Decision, Live

DEADLINE_S = 30.0


class Engine:
    """Shows one (live requests, steps) of ``looks`` a look at its boards, and stays at the last one."""

    max_new_tokens = 64
    sent = 7  # requests that it has sent to the ranks, ever
    paused = False

    def __init__(self, looks, steps_follow_layout=False, switch_with=None):
        self.looks, self.look = looks, -1
        self.layout = Layout(2, 1)
        self.switching, self.ended = asyncio.Lock(), asyncio.Event()
        self.asked, self.switch_with = [], switch_with  # what happens inside of a switch
        self.steps_follow_layout = steps_follow_layout

    def progress(self):
        self.look += 1
        if self.look >= len(self.looks):
            self.ended.set()
        live, steps = self.now
        # A board counts the steps of its rank; a replica's are those of its leader.
        return live, steps * len(self.layout.leaders) if self.steps_follow_layout else steps

    @property
    def in_flight(self):
        """Requests without an answer, as the main process counts them."""
        return self.now[0]

    @property
    def now(self):
        return self.looks[min(self.look, len(self.looks) - 1)]

    def step_marks(self):
        return [self.look, self.look]

    def steady_steps(self, since):
        """One step of three requests a look."""
        rows = np.zeros(max(self.look - since[0], 0), STEP)
        rows["batch"], rows["context"], rows["seconds"] = 3, 90, 0.5
        return rows

    def live_rows(self):
        rows = [(100 + i, 10 + i, i) for i in range(self.now[0])]
        return [rows[replica :: self.layout.dp] for replica in range(self.layout.dp)]

    async def async_rebalance(self, kv, *, decision, rows):
        return await self.async_switch(self.layout.tp, kv, decision=decision, rows=rows) | {"total_s": 0.125}

    async def async_switch(self, tp, kv, *, decision, rows):
        async with self.switching:
            self.asked.append((tp, kv, decision, rows))
            if self.switch_with:
                await self.switch_with(self)
            before, self.layout = self.layout.tp, Layout(2, tp)
            return {"tp_from": before, "tp_to": tp, "total_s": 0.25 if tp != before else 0.0}


class Policy:
    """Notes the look at which it is asked; answers with ``answers[time asked]``, else to stay."""

    def __init__(self, engine, answers=None):
        self.engine, self.answers = engine, answers or {}
        self.looks, self.states, self.steps = [], [], []

    def decide(self, state):
        answer = self.answers.get(len(self.looks), Decision(state.tp))
        self.looks.append(self.engine.look)
        self.states.append(state)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def observe(self, lengths, finished):
        raise AssertionError("not the controller's business")

    def observe_steps(self, tp, batch, context, seconds):
        assert (set(batch), set(context), set(seconds)) <= ({3}, {90}, {0.5})
        self.steps.append((tp, len(batch)))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "DECISION_SHARE", float("inf"))


def play(looks, answers=None, then=None, **options):
    """Run a controller over ``looks``, ``then(controller)`` and stop it: (engine, policy, controller)."""

    async def main():
        engine = Engine(looks, **options)
        policy = Policy(engine, answers)
        controller = Controller(engine, policy)
        controller.start()
        ended = asyncio.ensure_future(engine.ended.wait())
        await asyncio.wait({ended, controller.task}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if then:
            await then(controller)
        await asyncio.wait_for(controller.stop(), DEADLINE_S)
        return engine, policy, controller

    return asyncio.run(main())


def lives(*counts):
    return [(count, 0) for count in counts]


@pytest.mark.parametrize(
    ("looks", "decided"),
    [
        (lives(0, 0, 0), []),
        (lives(0, 1, 3, 6, 6, 6, 6), [4]),  # not while they come in, once when no more do
        (lives(4, 4, 3, 3, 3, 1, 1), [1, 2, 5]),  # at every finish
        (lives(4, 4, 6, 6, 6), [1, 3]),  # at later arrivals
        (lives(2, 2, 1, 0, 0, 3, 3), [1, 2, 6]),  # idle in between
    ],
)
def test_the_policy_is_asked_after_arrivals_and_at_finishes(looks, decided):
    _, policy, _ = play(looks)
    assert policy.looks == decided


def test_the_policy_is_not_asked_before_all_requests_that_were_announced_have_come():
    async def announced(controller):
        engine, policy = controller.engine, controller.policy
        controller.begin(6)
        for sent, look in ((11, 3), (13, 9)):  # a gap between arrivals, in which some decode already
            engine.sent, asked = sent, len(policy.looks)
            engine.looks = lives(4, 4, 4, 6, 6, 6)
            engine.look = -1 if look == 3 else 2
            engine.ended.clear()
            await asyncio.wait_for(engine.ended.wait(), DEADLINE_S)
            assert (len(policy.looks) > asked) == (sent == 13)

    play(lives(0, 0), then=announced)


def test_the_policy_is_asked_every_few_steps():
    n = STEPS_BETWEEN_DECISIONS
    counts = (0, 0, n // 2, n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1)
    _, policy, _ = play([(4, steps) for steps in counts])
    assert [counts[look] for look in policy.looks] == [0, n, 2 * n]


def test_the_policy_is_asked_every_few_steps_after_a_switch_too():
    """Of two replicas' steps, one's are left: their number falls to a half."""
    steps = [10_000, 10_000] + [10_000 + i for i in range(1, 4 * STEPS_BETWEEN_DECISIONS)]
    answers = {0: Decision(2, kv="migrate")}
    _, policy, _ = play([(4, number) for number in steps], answers, steps_follow_layout=True)
    assert policy.states[0].tp == 1
    assert len([state for state in policy.states if state.tp == 2]) >= 3


def test_the_policy_sees_the_live_requests_of_every_replica():
    _, policy, _ = play(lives(3, 3))
    (state,) = policy.states
    assert (state.tp, state.cap, state.switches, state.switch_s) == (1, 64, 0, 0.0)
    assert state.replicas == ((Live(10, 0), Live(12, 2)), (Live(11, 1),))
    assert state.elapsed_s >= 0


def test_a_decision_to_switch_is_carried_out_and_counted():
    decision = Decision(2, saving_s=3.0, cost_s=1.0, kv="recompute")
    engine, policy, controller = play(lives(3, 3, 2, 2), {0: decision})
    assert engine.asked == [(2, "recompute", decision, [[(100, 10, 0), (102, 12, 2)], [(101, 11, 1)]])]
    assert (controller.switches, controller.switch_s) == (1, 0.25)
    after = policy.states[1]
    assert (after.tp, after.switches, after.switch_s) == (2, 1, 0.25)
    assert after.replicas == ((Live(10, 0), Live(11, 1)),)
    assert len(controller.decision_s) == 2


def test_a_decision_to_stay_asks_nothing_of_the_engine():
    engine, policy, controller = play(lives(3, 3, 2))
    assert len(policy.states) == 2
    assert (engine.asked, controller.switches) == ([], 0)


def test_a_switch_that_had_to_be_undone_is_not_tried_again_in_this_generation():
    async def fail(_engine):
        raise SwitchUndone("no room")

    async def next_generation(controller):
        assert (len(controller.engine.asked), controller.switches) == (1, 0)
        controller.begin()
        controller.engine.look = -1
        controller.engine.ended.clear()
        await asyncio.wait_for(controller.engine.ended.wait(), DEADLINE_S)

    answers = {time: Decision(2, kv="migrate") for time in range(9)}
    engine, _, _ = play(lives(4, 4, 3, 2, 1), answers, next_generation, switch_with=fail)
    assert len(engine.asked) == 2


def test_a_switch_made_by_hand_at_the_same_moment_is_no_error():
    async def by_hand(engine):
        engine.layout = Layout(2, 2)

    _, policy, controller = play(lives(4, 4, 3), {0: Decision(2, kv="migrate")}, switch_with=by_hand)
    assert controller.switches == 0
    assert [state.tp for state in policy.states] == [1, 2]


@pytest.mark.parametrize("error", [ZeroDivisionError("policy"), SwitchError("ranks [1] did not answer")])
def test_what_ends_the_run_surfaces_when_it_is_stopped(error):
    with pytest.raises(type(error), match=str(error).replace("[", r"\[")):
        play(lives(2, 2), {0: error})


def test_what_ends_the_run_surfaces_when_it_is_started_again():
    async def start_again(controller):
        with pytest.raises(ZeroDivisionError):
            controller.start()
        with pytest.raises(ZeroDivisionError):
            await controller.stop()
        controller.start()  # told twice: a new run may begin

    play(lives(2, 2), {0: ZeroDivisionError()}, start_again)


def test_stop_waits_for_a_switch_in_progress():
    async def main():
        started, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(_engine):
            started.set()
            await go_on.wait()

        engine = Engine(lives(2, 2), switch_with=slowly)
        controller = Controller(engine, Policy(engine, {0: Decision(2, kv="migrate")}))
        controller.start()
        await asyncio.wait_for(started.wait(), DEADLINE_S)
        stop = asyncio.ensure_future(controller.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stop.done()
        assert engine.layout.tp == 1
        go_on.set()
        await asyncio.wait_for(stop, DEADLINE_S)
        assert engine.layout.tp == 2
        assert controller.switches == 1

    asyncio.run(main())


def test_a_second_start_changes_nothing_and_stop_ends_the_decisions():
    async def main():
        engine = Engine(lives(2, 2, 1, 2, 2))
        controller = Controller(engine, Policy(engine))
        controller.start()
        task = controller.task
        controller.start()
        assert controller.task is task
        await asyncio.wait_for(engine.ended.wait(), DEADLINE_S)
        await controller.stop()
        await controller.stop()  # of a stopped one
        look = engine.look
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.look == look

    asyncio.run(main())


def test_a_new_generation_starts_its_counters_again():
    _, _, controller = play(lives(3, 3), {0: Decision(2, kv="migrate")})
    assert controller.switches == 1
    controller.begin()
    assert (controller.switches, controller.switch_s, controller.decision_s) == (0, 0.0, [])
    assert controller.state([]).elapsed_s == 0.0


def test_the_policy_is_not_asked_while_generation_is_paused():
    class Paused(Engine):
        @property
        def paused(self):
            return self.look < 4

    async def main():
        engine = Paused(lives(2, 2, 2, 2, 2, 2, 2))
        policy = Policy(engine)
        controller = Controller(engine, policy)
        controller.start()
        await asyncio.wait_for(engine.ended.wait(), DEADLINE_S)
        await asyncio.wait_for(controller.stop(), DEADLINE_S)
        return policy.looks

    assert asyncio.run(main()) == [4]


def test_the_policy_waits_for_requests_that_no_rank_has_seen_yet():
    # Ranks read between steps: during a long prefill they show the two requests that it began with.
    class Busy(Engine):
        @property
        def in_flight(self):
            return 6

    async def main():
        engine = Busy(lives(2, 2, 2, 2, 6, 6, 6))
        policy = Policy(engine)
        controller = Controller(engine, policy)
        controller.start()
        await asyncio.wait_for(engine.ended.wait(), DEADLINE_S)
        await asyncio.wait_for(controller.stop(), DEADLINE_S)
        return [len(state.live) for state in policy.states]

    assert asyncio.run(main()) == [6]


def test_a_rebalance_is_carried_out_and_is_no_change_of_tp():
    spread = Decision(1, kv="migrate", rebalance=True)
    engine, policy, _ = play(lives(4, 4, 3, 2, 2), {0: spread})
    assert engine.asked == [(1, "migrate", spread, [[(100, 10, 0), (102, 12, 2)], [(101, 11, 1), (103, 13, 3)]])]
    assert [(state.switches, state.switch_s) for state in policy.states] == [(0, 0.0), (0, 0.125), (0, 0.125)]


def test_the_policy_sees_every_decode_step_once():
    _, policy, _ = play(lives(0, 4, 4, 4, 3, 1, 1))
    assert policy.looks == [2, 4, 5]
    assert policy.steps == [(1, 2), (1, 2), (1, 1)]  # since the last decision, or since something arrived


@pytest.mark.parametrize(("worked_s", "looks"), [(0.1, [1, 4, 7, 10]), (0.001, list(range(1, 10)))])
def test_decisions_take_half_a_percent_of_the_time_at_most(monkeypatch, worked_s, looks):
    clock, own = [1000.0], [0.0]

    class Slow(Policy):
        def decide(self, state):
            clock[0] += 0.1
            own[0] += worked_s  # of that time; 0.1: hence not again in the next 20 s. Else it waited for a core
            return super().decide(state)

    def look(engine):
        clock[0] += 7.0
        return progress(engine)

    progress = Engine.progress
    monkeypatch.setattr(module, "DECISION_SHARE", 0.005)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module.time, "thread_time", lambda: own[0])
    monkeypatch.setattr(Engine, "progress", look)
    monkeypatch.setitem(globals(), "Policy", Slow)
    _, policy, _ = play(lives(9, 9, 8, 7, 6, 5, 4, 3, 2, 1))
    assert policy.looks == looks


class Slow(Policy):
    """Takes its time: until the event loop has run meanwhile, or for ever."""

    def __init__(self, engine, answer, loop):
        super().__init__(engine, {0: answer})
        self.loop, self.ran = loop, threading.Event()
        self.meanwhile = lambda: None

    def decide(self, state):
        if not self.looks:
            self.loop.call_soon_threadsafe(lambda: (self.meanwhile(), self.ran.set()))
            assert self.ran.wait(DEADLINE_S), "the event loop stood still while the policy thought"
        return super().decide(state)


@pytest.mark.parametrize(("arrive", "asked"), [(0, [2]), (1, [])])
def test_the_event_loop_goes_on_while_the_policy_thinks_and_what_came_meanwhile_makes_its_answer_void(arrive, asked):
    async def main():
        engine = Engine(lives(4, 4, 4, 4, 4))
        policy = Slow(engine, Decision(2, kv="auto"), asyncio.get_running_loop())
        policy.meanwhile = lambda: setattr(engine, "sent", engine.sent + arrive)
        controller = Controller(engine, policy)
        controller.start()
        await asyncio.wait_for(engine.ended.wait(), DEADLINE_S)
        await asyncio.wait_for(controller.stop(), DEADLINE_S)
        return [tp for tp, *_ in engine.asked]

    assert asyncio.run(main()) == asked
