"""Files are UTF-8 whatever the user's locale is."""

import ast
import os
import subprocess
import sys

import pytest

from tests.workflow.project import ROOT

SOURCES = sorted((ROOT / "pat").rglob("*.py"))
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOT_FILES = ("Board", "os")  # whose open() is something else


def unsaid(call: ast.Call) -> bool:
    """Whether a call reads or writes text and names no encoding."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if "encoding" in given or None in given:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name in ("run", "Popen", "check_output"):
        return "text" in given or "universal_newlines" in given
    if name != "open" or getattr(getattr(call.func, "value", None), "id", None) in NOT_FILES:
        return False
    before = 0 if isinstance(call.func, ast.Attribute) else 1  # arguments before the mode
    mode = given.get("mode") or (call.args[before] if len(call.args) > before else ast.Constant("r"))
    return "b" not in getattr(mode, "value", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_whoever_opens_text_says_its_encoding(path):
    calls = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call))
    assert [call.lineno for call in calls if unsaid(call)] == []


def test_the_rule_finds_what_it_is_for():
    wrong = ["open(p)", "p.open('w')", "p.read_text()", "p.write_text(t)", "run(c, text=True)"]
    right = ["open(p, 'rb')", "p.open('wb')", "p.read_text('utf-8')", "Board.open(p)", "run(c)"]
    assert [unsaid(ast.parse(text).body[0].value) for text in wrong + right] == [True] * 5 + [False] * 5


def test_the_command_line_in_a_locale_of_ascii(tmp_path):
    """Reads and prints what the locale has no characters for."""
    raw = (ROOT / "config" / "ci.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(raw.replace("ranks:", "# 100 % ± 1 →\nranks:", 1), encoding="utf-8")
    (tmp_path / "wrong.yaml").write_text(f"größe: 1\n{raw}", encoding="utf-8")

    def check(file):
        command = [sys.executable, "-X", "warn_default_encoding", "-m", "pat.cli", "check", "--config", file]
        environment = os.environ | ASCII
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)

    done = check("config.yaml")
    assert done.returncode == 0, done.stderr
    assert b"ci-qwen3: arms" in done.stdout
    assert not [line for line in done.stderr.splitlines() if b"EncodingWarning" in line and b"/pat/" in line]
    refused = check("wrong.yaml")
    assert refused.returncode == 2
    assert b"did you mean" in refused.stderr or b"an unknown key" in refused.stderr, refused.stderr
