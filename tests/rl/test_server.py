"""What a server does between generations, without an engine: what the policy learns again after an interruption."""

from types import SimpleNamespace

import pytest

from pat.rl.server import Server
from tests.rl.recording import generation, request, write

CAP = 20


@pytest.fixture
def server(tmp_path):
    """A server of replica 1 at the start of iteration 4, whose policy keeps what it is shown."""
    made = Server.__new__(Server)  # its engine is not needed
    made.settings = SimpleNamespace(log=tmp_path / "rollout")
    made.replica_rank, made.cap, made.iteration = 1, CAP, SimpleNamespace(number=4)
    made.shown = []
    made.policy = SimpleNamespace(observe=lambda tokens, ended: made.shown.append((tokens, ended)))
    return made


def test_the_policy_is_shown_what_this_server_generated_before_the_checkpoint(server, tmp_path):
    lengths = {1: [5, 6], 2: [7, CAP], 3: [CAP, 8], 4: [9, 9]}  # 4: generated, and then lost with the interruption
    for number, tokens in lengths.items():
        made = [request(i, 0.0, 1.0, n, reason="length" if n == CAP else "stop") for i, n in enumerate(tokens)]
        other = [request(0, 0.0, 1.0, 3)]
        write(tmp_path, [generation(number, made, replica=1), generation(number, other, replica=0)])
    server._relearn()
    assert server.shown == [([5, 6], [True, True]), ([7, CAP], [True, False]), ([CAP, 8], [False, True])]


def test_the_first_time_there_is_nothing_to_learn(server):
    server._relearn()
    server.settings.log = None
    server._relearn()
    assert server.shown == []


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [([1, 0, 4], 1, [0, 1, 4]), (1, [2, 1], [1, 2]), (None, 3, [3]), (4, None, [4]), (None, None, [])],
)
def test_a_response_ends_at_every_token_that_verl_knows_of(server, generation, config, ends):
    server.model = SimpleNamespace(
        generation_config=generation if generation is None else SimpleNamespace(eos_token_id=generation),
        hf_config=SimpleNamespace(eos_token_id=config),
    )
    assert server._end_tokens() == ends
