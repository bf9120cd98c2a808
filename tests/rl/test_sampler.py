"""The trainer gets whole iterations: a sample that verl has dropped ends the training."""

from types import SimpleNamespace

import pytest

from pat.rl import verl_api
from pat.rl.iteration import COUNTED, IterationError


@pytest.fixture
def buffer(monkeypatch):
    """A buffer of three samples a prompt, whose ``held`` are the keys that verl has of the batch."""
    from pat.rl.sampler import POLL_S, PromptReplayBuffer

    made = PromptReplayBuffer("sync", {}, None, "drop", sampler_kwargs={"samples": 3})
    assert made.poll_interval == POLL_S
    held = SimpleNamespace(keys=[])
    monkeypatch.setattr(verl_api.ReplayBuffer, "sample", lambda self, **kwargs: (held, {"theirs": 1}))
    made.held = held
    return made


def keys(lost=(), turns=1):
    """Keys of two prompts with three samples each, of as many turns."""
    every = [(uid, n) for uid in ("a", "b") for n in range(3)]
    return [f"{uid}_{n}_{turn}" for uid, n in every if (uid, n) not in lost for turn in range(turns)]


@pytest.mark.parametrize("turns", [1, 2])
def test_samples_are_counted_whatever_their_turns(buffer, turns):
    buffer.held.keys = keys(turns=turns)
    batch, metrics = buffer.sample(global_steps=4, partition_id="train", batch_size=2)
    assert batch is buffer.held
    assert metrics == {"theirs": 1, COUNTED: 6}


@pytest.mark.parametrize(
    ("lost", "left"), [({("a", 0)}, 5), ({("a", 0), ("b", 2)}, 4), ({("b", n) for n in range(3)}, 3)]
)
def test_a_lost_sample_ends_the_training(buffer, lost, left):
    buffer.held.keys = keys(lost)
    with pytest.raises(IterationError, match=f"iteration 4: {left} of 6 samples can be trained on"):
        buffer.sample(global_steps=4, partition_id="train", batch_size=2)


def test_a_validation_is_verls_own_affair(buffer):
    buffer.held.keys = keys({("a", 0)})
    assert buffer.sample(global_steps=4, partition_id="val", batch_size=2) == (buffer.held, {"theirs": 1})
