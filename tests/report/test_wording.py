import json

import polars as pl
import pytest

from pat.report import wording
from pat.report.experiment import load
from pat.report.summary import summarise
from tests.synthetic import LENGTHS, write_experiment


def told(directory, generation, **options):
    experiment = load(write_experiment(directory, generation, **options))
    return experiment, summarise(experiment)


@pytest.mark.parametrize(
    ("pat", "words"),
    [
        (
            30.0,
            "40.0 % less time than the default tp1 (50.0 s) and 25.0 % less time than the best static",
        ),
        (
            44.0,
            "12.0 % less time than the default tp1 (50.0 s) and 10.0 % more time than the best static",
        ),
        (
            60.0,
            "20.0 % more time than the default tp1 (50.0 s) and 50.0 % more time than the best static",
        ),
        (40.1, "and within 1 % of the best static size tp2 (40.0 s)."),
    ],
)
def test_the_answer_says_faster_and_slower_alike(tmp_path, pat, words):
    _, summary = told(tmp_path, {"tp1": (55.0, 50.0), "tp2": (45.0, 40.0), "pat": (70.0, pat)})
    assert words in wording.answer(summary)


def test_the_answer_when_the_default_is_the_best_static_size(tmp_path):
    _, summary = told(tmp_path, {"tp1": (9.0, 4.0), "tp2": (9.0, 8.0), "pat": (9.0, 5.0)})
    assert "25.0 % more time than tp1 (4.00 s), which is both the default and the best" in wording.answer(summary)


def test_the_answer_with_one_static_size(tmp_path):
    _, summary = told(tmp_path, {"tp2": (9.0, 4.0), "pat": (9.0, 3.0)})
    assert wording.answer(summary).endswith("25.0 % less time than tp2 (4.00 s), the only static size run.")


def test_the_answer_without_pat_or_without_a_static_size(tmp_path):
    _, summary = told(tmp_path / "a", {"tp1": (9.0, 4.0), "tp2": (9.0, 3.0)})
    assert wording.answer(summary) == (
        "Generation was fastest with tp2 (tp1 4.00 s, tp2 3.00 s); the arm pat was not run."
    )
    assert wording.settled(summary) is None
    _, summary = told(tmp_path / "b", {"pat": (9.0, 3.0)})
    assert "no static size was run" in wording.answer(summary)


@pytest.mark.parametrize(
    ("pat", "words"),
    [
        ((9.0, 3.0, 3.5), "was faster than with tp1 in every iteration"),
        ((9.0, 4.5, 5.0), "was slower than with tp1 in every iteration"),
        ((9.0, 3.5, 5.0), "faster than with tp1 in some iterations and not in others"),
        ((9.0, 3.0), "A single iteration was compared"),
    ],
)
def test_the_order_is_settled_only_if_every_iteration_agrees(tmp_path, pat, words):
    _, summary = told(tmp_path, {"tp1": (9.0, 4.0, 4.0), "pat": pat})
    assert words in wording.settled(summary)


def test_cautions_of_a_clean_experiment(tmp_path):
    notes = wording.cautions(*told(tmp_path, {"tp1": (9.0, 4.0, 4.0), "pat": (9.0, 3.0, 3.0)}))
    assert "warm-up and left out" in notes[0]
    assert "the same response lengths" in notes[1]
    assert any("no accelerator" in note for note in notes)
    assert not any("not matched" in note or "unequal" in note or "different settings" in note for note in notes)


@pytest.mark.parametrize(("unfinished", "said"), [(len(LENGTHS), True), (len(LENGTHS) - 1, False)])
def test_a_size_taken_from_the_start_is_told_from_a_switch_under_way(tmp_path, unfinished, said):
    generation = {"tp1": (9.0, 4.0, 4.0), "tp2": (9.0, 4.0, 4.0), "pat": (9.0, 3.0, 3.0)}
    write_experiment(tmp_path, generation)
    file = tmp_path / "train" / "pat" / "switches.parquet"
    switches = pl.read_parquet(file)
    live = pl.when(pl.col("unfinished") > 0).then(unfinished).otherwise(0)
    switches.with_columns(unfinished=live.cast(switches.schema["unfinished"])).write_parquet(file)
    experiment = load(tmp_path)
    notes = wording.cautions(experiment, summarise(experiment))
    assert any("went to tp2 before any response had ended" in note for note in notes) == said
    assert any("one after the other" in note for note in notes)


def test_cautions_name_what_weakens_the_comparison(tmp_path):
    generation = {"tp1": (9.0, 4.0, 4.0), "tp2": (5.0,), "pat": (9.0, 3.0)}
    write_experiment(tmp_path, generation, lengths={"pat": (*LENGTHS[:-8], *[5] * 8)})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "report.json").write_text(json.dumps({"arms": [*generation, "tp4"]}))
    run = tmp_path / "train" / "pat" / "run.json"
    content = json.loads(run.read_text())
    content["config"]["train"]["lr"] = 1e-3
    run.write_text(json.dumps(content))
    experiment = load(tmp_path)
    notes = "\n".join(wording.cautions(experiment, summarise(experiment)))
    assert "tp2 ran one iteration only" in notes
    assert "tp1 2, tp2 1, pat 1" in notes
    assert "not run: tp4" in notes
    assert "different settings of: train." in notes


def test_unmatched_lengths_show_the_work_of_each_arm(tmp_path):
    lengths = {"pat": (*LENGTHS[:8], *[5] * 8)}
    notes = wording.cautions(*told(tmp_path, {"tp1": (9.0, 4.0), "pat": (9.0, 3.0)}, lengths=lengths))
    note = next(note for note in notes if "not matched" in note)
    assert "50 % of the responses" in note
    assert f"tp1 {sum(LENGTHS):,} / 320, pat {sum(LENGTHS[:8]) + 40} / 104" in note


@pytest.mark.parametrize(
    ("fastest", "matched", "words"),
    [
        (("pat", "tp2", 4.8, True), 1.0, "pat fastest, 4.8 % ahead of tp2"),
        (("tp2", "pat", 4.8, False), None, "not settled, tp2 or pat"),
        (("tp2", "pat", 0.8, True), None, "tp2 and pat within 1 %"),
        (("tp2", None, None, None), None, "tp2: 3.00 s"),
        (("pat", "tp2", 4.8, True), 0.9, "pat fastest, 4.8 % ahead of tp2 (unequal lengths)"),
    ],
)
def test_the_verdict_is_no_stronger_than_the_numbers(fastest, matched, words):
    names = ("arm", "runner_up", "lead_pct", "every")
    assert wording.verdict(dict(zip(names, fastest, strict=True)) | {"seconds": 3.0}, matched) == words


@pytest.mark.parametrize(
    ("value", "text"), [(3.4, "3 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3599.7, "1 h 0 min"), (7380, "2 h 3 min")]
)
def test_durations(value, text):
    assert wording.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (0.0, "0"),
        (1234.5, "1,234"),
        (53.52, "53.5"),
        (5.0, "5.00"),
        (0.5, "0.50"),
        (0.0123, "0.012"),
    ],
)
def test_numbers_have_about_three_digits(value, text):
    assert wording.number(value) == text
