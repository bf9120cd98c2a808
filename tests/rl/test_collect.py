"""From generations and verl's metrics to an arm's Parquet files."""

from dataclasses import replace

import polars as pl
import pytest

from pat.predictor import Predictor
from pat.predictor.latency import DecodeModel, PrefillModel
from pat.predictor.regression import Curve
from pat.predictor.switching import SwitchModel
from pat.rl import collect
from pat.rl.iteration import COUNTED, IterationError
from tests.rl.recording import METRICS, generation, request, switch, write

# Seconds of a step at tp 1: decode 0.01 + 0.002 a request + 0.0001 a token in KV; prefill 0.5 + 0.001 a token
# + 0.1 a request.
PREDICTOR = Predictor(
    DecodeModel({1: Curve((0, 1), (0.01, 0.012))}, {1: Curve((0, 1), (0.0, 0.0001))}),
    PrefillModel({1: Curve((0, 1), (0.5, 0.501))}, {1: (0.1, 0.0, 0.0, 0.0, 0.0)}),
    SwitchModel({}),
)


def stays_s(live, total) -> float:
    """Seconds, step by step, until all ``live`` (key, prompt, generated) by replica have ``total`` tokens."""
    ends = []
    for replica in live:
        contexts = {key: prompt + generated for key, prompt, generated in replica}
        left = {key: total[key] - generated for key, _, generated in replica}
        fresh = [prompt for _, prompt, generated in replica if generated == 0]
        clock = 0.5 + 0.001 * sum(fresh) + 0.1 * len(fresh) if fresh else 0.0
        while any(left.values()):
            running = [key for key in left if left[key]]
            context = sum(contexts[key] + 0.5 for key in running)  # half-way through the step
            clock += 0.01 + 0.002 * len(running) + 0.0001 * context
            for key in running:
                contexts[key], left[key] = contexts[key] + 1, left[key] - 1
        ends.append(clock)
    return max(ends)


def collected(tmp_path, generations, metrics, samples, predictor=None):
    """The four tables by name."""
    write(tmp_path, generations, metrics)
    if predictor:
        predictor.save(tmp_path / "model.json")
    collect.write(tmp_path, tmp_path / "model.json" if predictor else None, samples)
    names = ("requests", "switches", "iterations", "decode")
    return {name: pl.read_parquet(tmp_path / f"{name}.parquet") for name in names}


def test_requests_are_numbered_by_arrival_over_all_replicas(tmp_path):
    replicas = [
        generation(1, [request(1, 100.0, 104.0, 7, seed=11), request(2, 100.5, 103.0, 3, seed=12)]),
        generation(1, [request(3, 100.25, 108.0, 9, prompt=4, reason="length", seed=13)], replica=1),
    ]
    table = collected(tmp_path, replicas, [METRICS], samples=3)["requests"]
    assert table.schema == collect.REQUESTS
    assert table["request"].to_list() == [0, 1, 2]
    assert table["seed"].to_list() == [11, 13, 12]
    assert table["arrive_s"].to_list() == [0.0, 0.25, 0.5]
    assert table["finish_s"].to_list() == [4.0, 8.0, 3.0]
    assert table["finish_reason"].to_list() == ["stop", "length", "stop"]
    assert table["prompt_tokens"].to_list() == [10, 4, 10]
    assert table["server"].to_list() == [0, 1, 0]


def test_servers_of_two_machines_meet_on_the_wall_clock(tmp_path):
    # The second machine has been up for 900 s less; its request came 2 s later.
    steps = [{"start": 2.5}, {"start": 3.0}, {"start": 3.5}]
    replicas = [
        generation(1, [request(1, 1000.0, 1004.0, 7)], [switch(1001.0, unfinished=1, total_s=0.5)], clock=5000.0),
        generation(
            1,
            [request(2, 102.0, 109.0, 9)],
            [switch(103.0, unfinished=1, total_s=0.25), switch(105.0, unfinished=1, total_s=0.5)],
            [step | {"start": 100 + step["start"], "batch": 1} for step in steps],
            replica=1,
            decision_s=(0.5, 0.25),
            clock=5900.0,
        ),
    ]
    tables = collected(tmp_path, replicas, [METRICS], samples=2)
    assert tables["requests"].select("server", "arrive_s", "finish_s").rows() == [(0, 0.0, 4.0), (1, 2.0, 9.0)]
    assert tables["switches"].select("server", "switch", "at_s").rows() == [(0, 0, 1.0), (1, 1, 3.0), (1, 2, 5.0)]
    assert tables["decode"].filter(pl.col("server") == 1)["at_s"].to_list() == [3.0, 3.5]
    row = tables["iterations"].row(0, named=True)
    assert (row["samples"], row["tokens"], row["switches"]) == (2, 16, 3)
    # Servers switch side by side: the iteration has lost what the one that lost most has.
    assert (row["switch_s"], row["decision_s"]) == (0.75, 0.75)


def test_a_checkpoint_is_not_part_of_the_iterations_time(tmp_path):
    one = [generation(n, [request(1, 0.0, 1.0, 2)]) for n in (1, 2)]
    metrics = [METRICS, METRICS | {"timing_s/save_checkpoint": 2.5}]
    table = collected(tmp_path, one, metrics, samples=1)["iterations"]
    assert table.select("iteration_s", "save_s").rows() == [(9.0, None), (6.5, 2.5)]


def test_the_first_iteration_after_each_start_is_a_warm_up(tmp_path):
    write(tmp_path, [generation(n, [request(1, 0.0, 1.0, 2)]) for n in range(1, 6)], [METRICS] * 5)
    collect.write(tmp_path, None, 1, starts=(0, 3))
    table = pl.read_parquet(tmp_path / "iterations.parquet")
    assert table.filter("warm_up")["iteration"].to_list() == [1, 4]


def test_metrics_of_an_earlier_start_come_first_and_none_counts_twice(tmp_path):
    write(tmp_path, metrics=[METRICS, METRICS])
    (tmp_path / "verl.jsonl").rename(tmp_path / "verl-before.jsonl")
    with (tmp_path / "verl.jsonl").open("w") as file:
        file.write('{"step": 2, "data": {"again": 1}}\n{"step": 3, "data": {}}\n')
    lines = collect.verl_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["data"] == {"again": 1}


def test_an_iteration_has_verls_times_and_our_counts(tmp_path):
    requests = [request(i, 50.0, 51.0 + i, tokens=10 + i, reason="length" if i > 16 else "stop") for i in range(20)]
    second = generation(2, requests, decision_s=[0.25, 0.5])
    metrics = [METRICS, METRICS | {"timing_s/gen": 6.5, "training/rollout_probs_diff_max": 0.03}]
    table = collected(tmp_path, [generation(1, requests), second], metrics, samples=20)["iterations"]
    assert table.schema == collect.ITERATIONS
    row = table.row(1, named=True)
    assert (row["iteration"], row["gen_s"], row["iteration_s"], row["update_s"]) == (2, 6.5, 9.0, 3.0)
    assert (row["reward_mean"], row["prob_diff_max"], row["old_log_prob_s"]) == (0.25, 0.03, None)
    assert (row["samples"], row["tokens"], row["truncated"]) == (20, sum(range(10, 30)), 3)
    assert (row["response_len_mean"], row["response_len_max"]) == (19.5, 29)
    assert (row["switches"], row["switch_s"], row["decision_s"]) == (0, 0.0, 0.75)
    assert (row["save_s"], row["warm_up"]) == (None, False)
    # Of 20, at most 2 are alive from the end of the 18th, at 68 s, to that of the 20th, at 70 s.
    assert row["tail_s"] == 2.0


def test_only_switches_under_way_count_but_all_are_kept_in_order(tmp_path):
    requests = [request(1, 100.0, 120.0, 5), request(2, 100.0, 110.0, 5)]
    switches = [
        switch(108.0, unfinished=1, tp_from=2, tp_to=1, total_s=0.25),
        switch(98.5, unfinished=0),
        switch(104.0, unfinished=2, total_s=0.5),
    ]
    steps = [
        {"start": 104.25, "decode": 0, "seconds": 0.125},  # before the switch has ended
        {"start": 104.5, "decode": 0, "seconds": 0.125, "tp": 2},
        {"start": 105.0, "decode": 1, "tp": 2},
        {"start": 108.5, "decode": 0, "seconds": 1.5},
    ]
    tables = collected(tmp_path, [generation(1, requests, switches, steps)], [METRICS], samples=2)
    table = tables["switches"]
    assert table.schema == collect.SWITCHES
    assert table.select("switch", "at_s", "tp_from", "tp_to", "unfinished").rows() == [
        (0, -1.5, 1, 2, 0),
        (1, 4.0, 1, 2, 2),
        (2, 8.0, 2, 1, 1),
    ]
    assert table["prefill_s"].to_list() == [0.0, 0.125, 1.5]
    assert table["total_s"].to_list() == [0.5, 0.625, 1.75]
    assert table["agree_s"].to_list() == [0.01] * 3
    assert table["kv"].to_list() == ["migrate"] * 3
    row = tables["iterations"].row(0, named=True)
    assert (row["switches"], row["switch_s"]) == (2, 0.625 + 1.75)


LIVE = [[[1, 30, 5], [2, 40, 0]], [[3, 20, 8]]]
TOTAL = {1: 9, 2: 25, 3: 40}


@pytest.mark.parametrize("live", [LIVE, [[[1, 30, 5]], [[3, 20, 8], [2, 40, 1]]], [[[2, 40, 3]], []]])
def test_realised_saving_is_the_time_of_staying_minus_the_time_taken(tmp_path, live):
    requests = [request(key, 100.0, 101.0 + key, total) for key, total in TOTAL.items()]
    made = switch(100.75, live=live, saving=2.0, cost=0.5)
    table = collected(tmp_path, [generation(1, requests, [made])], [METRICS], 3, PREDICTOR)["switches"]
    took_s = max(101.0 + key for replica in live for key, *_ in replica) - 100.75
    assert table["realised_saving_s"].to_list() == [pytest.approx(stays_s(live, TOTAL) - took_s)]
    assert table.select("predicted_saving_s", "predicted_cost_s").rows() == [(2.0, 0.5)]


@pytest.mark.parametrize(("saving", "predictor"), [(None, PREDICTOR), (2.0, None)])
def test_a_switch_that_nobody_predicted_has_no_realised_saving(tmp_path, saving, predictor):
    requests = [request(key, 100.0, 101.0 + key, total) for key, total in TOTAL.items()]
    made = switch(100.75, live=LIVE, saving=saving)
    table = collected(tmp_path, [generation(1, requests, [made])], [METRICS], 3, predictor)["switches"]
    assert table["realised_saving_s"].to_list() == [None]


def test_an_arm_without_switches_has_an_empty_table_of_them(tmp_path):
    table = collected(tmp_path, [generation(1, [request(1, 0.0, 1.0, 2)])], [METRICS], samples=1)["switches"]
    assert (table.schema, table.height) == (collect.SWITCHES, 0)


def test_decode_steps_are_timed_from_the_first_arrival(tmp_path):
    steps = [
        {"start": 100.5, "decode": 0},
        {"start": 101.0, "context": 22},
        {"start": 101.5, "context": 24, "seconds": 0.25},
        {"start": 102.0, "batch": 1, "context": 13},
        {"start": 102.25, "batch": 1, "context": 14, "seconds": 0.125},
    ]
    one = generation(1, [request(1, 100.0, 104.0, 7)], steps=steps)
    table = collected(tmp_path, [one], [METRICS], samples=1)["decode"]
    assert table.rows(named=True) == [
        {"iteration": 1, "server": 0, "tp": 1, "batch": 2, "context": 24, "seconds": 0.25, "at_s": 1.5, "rank": 0},
        {"iteration": 1, "server": 0, "tp": 1, "batch": 1, "context": 14, "seconds": 0.125, "at_s": 2.25, "rank": 0},
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_missing_or_surplus_samples_name_the_iteration(tmp_path, samples):
    right = [request(i, 0.0, 1.0, 2) for i in range(samples)]
    other = [request(i, 0.0, 1.0, 2) for i in range(2)]
    write(tmp_path, [generation(1, right), generation(2, other)], [METRICS] * 2)
    with pytest.raises(IterationError, match=f"iteration 2: 2 samples came back, {samples} were asked for"):
        collect.write(tmp_path, None, samples)
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize("trained", [0, 1.0, 3.0])
def test_samples_that_were_generated_and_not_trained_on_are_told(tmp_path, trained):
    one = [generation(n, [request(i, 0.0, 1.0, 2) for i in range(2)]) for n in (1, 2)]
    write(tmp_path, one, [METRICS, METRICS | {COUNTED: trained}])
    with pytest.raises(IterationError, match=f"iteration 2: {trained:.0f} of 2 samples were trained on"):
        collect.write(tmp_path, None, 2)


def test_an_iteration_without_any_generation_is_named(tmp_path):
    write(tmp_path, [generation(1, [request(1, 0.0, 1.0, 2)])], [METRICS] * 2)
    with pytest.raises(IterationError, match="iteration 2: 0 samples"):
        collect.write(tmp_path, None, 1)


def test_a_line_that_verl_is_still_writing_is_left_for_later(tmp_path):
    assert collect.verl_lines(tmp_path) == []
    write(tmp_path, metrics=[METRICS, METRICS])
    with (tmp_path / "verl.jsonl").open("a") as file:
        file.write('{"step": 3, "da')
    assert [line["step"] for line in collect.verl_lines(tmp_path)] == [1, 2]


def test_a_generation_in_a_line():
    requests = [request(1, 100.0, 112.5, 7), request(2, 101.0, 105.0, 3)]
    switches = [switch(104.0, unfinished=0), switch(104.0, unfinished=2, total_s=0.75)]
    text = collect.describe(generation(4, requests, switches))
    assert text == "generated 10 tokens in 12.5 s, 2 responses; tp1 -> tp2 at 2 unfinished in 0.75 s"


def test_a_slow_machine_is_taken_into_account(tmp_path):
    requests = [request(key, 100.0, 101.0 + key, total) for key, total in TOTAL.items()]
    made = switch(100.75, live=LIVE, saving=2.0, cost=0.5)
    curve, none = Curve((0, 1), (0.02, 0.03)), Curve((0, 1), (0.0, 0.0))
    decode = DecodeModel({**PREDICTOR.decode.by_batch, 2: curve}, {**PREDICTOR.decode.by_context, 2: none})
    seconds = 3 * 0.04  # three times what the model says of a batch of two
    steps = [{"start": 102.0 + i, "tp": 2, "batch": 2, "context": 20, "seconds": seconds} for i in range(4)]
    table = collected(
        tmp_path, [generation(1, requests, [made], steps)], [METRICS], 3, replace(PREDICTOR, decode=decode)
    )["switches"]
    took_s = max(101.0 + key for replica in LIVE for key, *_ in replica) - 100.75
    assert table["realised_saving_s"].to_list() == [pytest.approx(3 * stays_s(LIVE, TOTAL) - took_s)]
