"""Whether two expressions are equal, by math-verify (0.9.0), in a process of its own.

Computer algebra may take for ever (9^(9^9)) or all memory, and what a model writes decides what it is asked. The guard
of math-verify is a signal, which the threads of a reward worker cannot have, and which waits for C code to return. Here
the kernel ends the process when a question has taken DEADLINE_S of processor time, and another one takes over.

    python -m pat.rl.algebra [DEADLINE_S]    asked by a line [truth, answer] or [truth] (JSON); answers true or false
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import subprocess
import sys
import threading
from functools import cache

DEADLINE_S = 5.0  # of processor time, so that scores do not depend on what else runs
START_S = 60.0
MEMORY = 4 << 30  # bytes


class Algebra:
    """The process, started when first asked."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, truth: str, answer: str) -> bool:
        """Whether both can be read and are equal; False too if that cannot be told within the limits."""
        return self._ask(truth, answer)

    def readable(self, truth: str) -> bool:
        """Whether ``truth`` can be read as LaTeX, within the limits."""
        return self._ask(truth)

    def _ask(self, *words: str) -> bool:
        with self._lock:
            process = self._process = self._process or _start(self._deadline_s)
            try:
                process.stdin.write(json.dumps(words) + "\n")
                process.stdin.flush()
                if reply := process.stdout.readline():
                    return reply == "true\n"
            except BrokenPipeError:
                pass
            self._process = None
            process.kill()
            process.communicate()
            return False


def _start(deadline_s: float) -> subprocess.Popen[str]:
    """Raises RuntimeError if the process does not come up: a missing package must not look like a wrong answer."""
    command = [sys.executable, "-m", "pat.rl.algebra", str(deadline_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if process.stdout.readline() != "ready\n":
        process.kill()
        process.communicate()
        raise RuntimeError("math-verify does not start (python -m pat.rl.algebra): is it installed (`pat doctor`)?")
    return process


def main(deadline_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, START_S)  # SIGPROF ends a process that does not handle it
    from math_verify import LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.WARNING)  # of timeouts that are off
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    @cache
    def read(text: str) -> list:
        # boxed: read as LaTeX, all of it and nothing else
        boxed = f"\\boxed{{{text}}}"
        return parse(boxed, extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)

    def judge(truth: str, *answer: str) -> bool:
        try:
            meant = read(truth)
            return bool(meant) and (not answer or verify(meant, parse_answer(*answer), timeout_seconds=None))
        except Exception:  # whatever computer algebra stumbles over is no equality
            return False

    parse_answer = read.__wrapped__  # answers hardly repeat
    print("ready", flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        right = judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(right), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else DEADLINE_S)
