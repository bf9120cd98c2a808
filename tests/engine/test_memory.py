"""What a switch takes: no second copy of the weights, and no weights over the wire."""

import re
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import Driver, Reference, ids, jobs, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4096}


@pytest.fixture(scope="module", params=["llama-untied", "qwen3-moe"])
def engine(request, model_folder):
    extra = {"moe_intermediate_size": 1024} if "moe" in request.param else {}
    folder = model_folder(request.param, **SHAPE, **extra)
    made = start(folder, tp_sizes=(1, 2, 4), max_total_tokens=1024)
    made.folder, made.weights = folder, sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
    yield made
    made.shutdown()


def memory(pid: int, what: str) -> int:
    """VmRSS or VmHWM (its peak) of a process, bytes."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_a_cycle_needs_a_tenth_of_the_weights_at_most(engine):
    driver, reference = Driver(engine), Reference(engine.folder)
    requests = jobs((40, 40))
    cycle = [(8, 2, "migrate"), (14, 4, "migrate"), (20, 1, "migrate"), (26, 4, "recompute"), (32, 2, "migrate")]
    expected = [reference.greedy(job.prompt, job.tokens) for job in requests]
    assert ids(driver.run(requests, switches=cycle)) == expected  # and all that a first time allocates
    ranks = [board.pid for board in engine.boards]
    assert len(set(ranks)) == 4
    before = [memory(pid, "VmRSS") for pid in ranks]
    for pid in ranks:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak
    assert ids(driver.run(requests, switches=cycle)) == expected
    grown = [memory(pid, "VmHWM") - rss for pid, rss in zip(ranks, before, strict=True)]
    assert max(grown) < 0.1 * engine.weights, f"grown by {grown} of {engine.weights} bytes of weights"
    assert all(rss > engine.weights for rss in before)  # they are there, once


def test_widening_sends_no_weights_to_other_ranks(engine):
    for tp in (2, 4, 2, 1, 4, 1):
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        record = engine.switch(tp)
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
        assert record["bytes_moved"] == 0
        assert sent < 0.02 * engine.weights, f"{sent} bytes went over the wire for tp {tp}"
