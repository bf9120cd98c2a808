"""Unfinished requests spread anew over the replicas of the same size, in real SGLang."""

import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module",
    params=[(2, (1, 2)), pytest.param((4, (1, 2, 4)), marks=pytest.mark.matrix)],
    ids=lambda param: f"{param[0]}-ranks",
)
def driver(request, model_folder):
    folder = model_folder("qwen3")
    ranks, sizes = request.param
    engine = start(folder, ranks=ranks, tp_sizes=sizes, max_total_tokens=2000, max_running_requests=32)
    made = Driver(engine)
    made.reference = Reference(folder)
    yield made
    engine.shutdown()


@pytest.mark.parametrize("kv", ["migrate", "recompute", "auto"])
def test_requests_are_spread_anew_and_go_on_with_the_same_tokens(driver, kv):
    engine = driver.engine
    for tp in engine.settings.tp_sizes[:-1]:
        engine.switch(tp)
        dp = engine.layout.dp
        # Dealt in turn: those of the first replica last, the others are done early.
        requests = jobs([90 if i % dp == 0 else 6 for i in range(6 * dp)])
        seen = []

        async def when_uneven(seen=seen, dp=dp, kv=kv):
            await driver.progress(20, live=6)
            seen.append([len(rows) for rows in engine.live_rows()])
            seen.append(await engine.async_rebalance(kv))
            seen.append([len(rows) for rows in engine.live_rows()])
            seen.append(await engine.async_rebalance(kv))

        outputs = driver.run(requests, during=when_uneven)
        assert ids(outputs) == [driver.reference.greedy(job.prompt, job.tokens) for job in requests]
        before, record, after, again = seen
        assert before == [6] + [0] * (dp - 1)
        assert (sum(after), max(after) - min(after)) == (6, int(6 % dp > 0))
        assert (record["tp_from"], record["tp_to"], record["unfinished"]) == (tp, tp, 6)
        assert record["requests_moved"] == 6 - after[0]
        if kv == "recompute":
            assert (record["kv_tokens_moved"], record["bytes_moved"]) == (0, 0)
            assert record["kv_tokens_recomputed"] > 20 * record["requests_moved"]
        elif kv == "migrate":
            assert record["kv_tokens_recomputed"] == 0
            assert record["bytes_moved"] > 0
            assert record["kv_tokens_moved"] > 20 * record["requests_moved"]
        assert (again["requests_moved"], again["kv_tokens_moved"]) == (0, 0)


def test_one_replica_has_nothing_to_rebalance(driver):
    driver.engine.switch(driver.engine.settings.tp_sizes[-1])
    before = len(driver.engine.switches)
    assert driver.engine.rebalance()["total_s"] == 0
    assert len(driver.engine.switches) == before


def test_an_unknown_way_for_kv_is_refused(driver):
    with pytest.raises(ValueError, match="kv='copy': allowed are recompute, migrate, auto"):
        driver.engine.rebalance("copy")
