"""Names and values reach MLflow in a form that MLflow itself accepts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow.utils import validation

from pat import mlflow_limits as limits

TEXT = st.text(min_size=1, max_size=400) | st.text("+./ a:-", min_size=1)


@given(TEXT)
@example("..a/./b//")
def test_every_name_is_one_that_mlflow_takes(text):
    validation._validate_param(limits.name(text), "")
    validation._validate_metric(limits.name(text), 1.0, 0, 0)


@given(st.lists(TEXT, unique=True))
def test_no_parameter_is_lost(keys):
    assert list(limits.names((key, key) for key in keys).values()) == [key[: limits.PARAM] for key in keys]


def test_names_that_are_allowed_stay_and_hydras_signs_go():
    assert limits.name("train.extra.trainer.save_freq") == "train.extra.trainer.save_freq"
    assert limits.name("gen/median seconds: tp1-2") == "gen/median seconds: tp1-2"
    assert limits.name("train.extra.+actor_rollout_ref.x") == "train.extra.actor_rollout_ref.x"
    assert limits.name("train.extra.++trainer.y") == "train.extra.trainer.y"


def test_limits_are_mlflows():
    assert limits.METRICS == validation.MAX_METRICS_PER_BATCH
    assert limits.PARAMS == validation.MAX_PARAMS_TAGS_PER_BATCH
    assert (limits.NAME, limits.PARAM) == (validation.MAX_ENTITY_KEY_LENGTH, validation.MAX_PARAM_VAL_LENGTH)
    assert (limits.TAG, limits.EXPERIMENT_TAG) == (
        validation.MAX_TAG_VAL_LENGTH,
        validation.MAX_EXPERIMENT_TAG_VAL_LENGTH,
    )
    assert limits.DATASET == validation.MAX_DATASET_NAME_SIZE


@pytest.mark.parametrize(("items", "expected"), [(["b"], "b"), (["a", "b"], "a, b"), ([], "")])
def test_few_items_are_all_listed(items, expected):
    assert limits.listed(items) == expected


def test_many_items_say_how_many_more_there_are():
    text = limits.listed([f"source-{i:03d}" for i in range(100)])
    assert text.startswith("source-000, source-001") and text.endswith(" more") and len(text) <= limits.DATASET
    assert len(limits.listed(["x" * 900])) == limits.DATASET


def test_a_long_note_ends_with_a_line():
    assert limits.lines("a\nb", 3) == "a\nb"
    cut = limits.lines("word\n" * 3000, limits.TAG)
    assert len(cut) <= limits.TAG and cut.endswith("summary.json)")
