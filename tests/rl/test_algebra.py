"""Equality of expressions comes from a process that may be ended at any question."""

import subprocess
import sys

import pytest

from pat.rl import algebra
from pat.rl.algebra import Algebra
from tests.rl.endings import gone


@pytest.fixture
def judge():
    made = Algebra(deadline_s=0.5)
    yield made
    if made._process:
        made._process.kill()
        made._process.communicate()


@pytest.mark.parametrize("endless", ["9^{9^{9^{9}}}", "(10^8)!"])
def test_a_question_without_end_is_ended_and_the_next_is_answered(judge, endless):
    assert judge.equal("x+1", "1+x")
    asked = judge._process.pid
    assert not judge.equal(endless, "1")
    assert gone(asked)
    assert judge.equal("x+1", "1+x")
    assert not judge.equal("x+1", "x")


def test_what_cannot_be_read_is_not_equal_even_to_itself(judge):
    assert [judge.readable(text) for text in (r"\frac{1}{x}", r"\frac{1}{", "2^{")] == [True, False, False]
    assert not judge.equal(r"\frac{1}{", r"\frac{1}{")


def test_it_ends_with_who_asked():
    ask = "from pat.rl.algebra import Algebra; a = Algebra(); a.equal('x', 'x'); print(a._process.pid, flush=True)"
    script = f"{ask}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    assert gone(int(done.stdout))


def test_a_process_that_does_not_start_is_an_error_not_a_score(monkeypatch):
    monkeypatch.setattr(algebra.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="math-verify does not start"):
        Algebra().equal("x", "x")
