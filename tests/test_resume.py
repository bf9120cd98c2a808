"""What was measured before an interruption is kept; what belongs to something else is not."""

import json

import pytest

from pat.resume import Partial, differences, fingerprint

SAME = {"settings": "{}", "machine": ["here", "cpu", 2]}


def test_samples_survive(tmp_path):
    path = tmp_path / "partial.jsonl"
    first = Partial(path, SAME)
    assert first.rows == {}
    first.add("a", {"seconds": [0.1, 0.2]}, 3.0)
    first.add("b", {"seconds": []}, 4.0)
    again = Partial(path, SAME)
    assert again.rows == {"a": {"seconds": [0.1, 0.2]}, "b": {"seconds": []}}
    assert again.seconds == 7.0
    again.add("c", None, 1.0)
    third = Partial(path, SAME)
    assert list(third.rows) == ["a", "b", "c"]
    assert third.seconds == 8.0


@pytest.mark.parametrize("cut", [1, 20, 45])
def test_a_torn_line_is_dropped(tmp_path, cut):
    path = tmp_path / "partial.jsonl"
    partial = Partial(path, SAME)
    partial.add("a", {"seconds": 1}, 1.0)
    partial.add("b", {"seconds": 2}, 1.0)
    path.write_text(path.read_text()[:-cut])  # killed while it wrote
    again = Partial(path, SAME)
    assert list(again.rows) == ["a"] if cut > 1 else ["a", "b"]
    again.add("c", {"seconds": 3}, 1.0)
    assert list(Partial(path, SAME).rows) == [*again.rows]  # what follows the torn line is whole


def test_samples_of_something_else_are_not_continued(tmp_path, capsys):
    path = tmp_path / "partial.jsonl"
    Partial(path, SAME).add("a", 1, 1.0)
    other = SAME | {"machine": ["there", "cpu", 2]}
    assert Partial(path, other).rows == {}
    assert "of another machine: not continued" in capsys.readouterr().out
    assert Partial(path, other).rows == {}
    path.write_text("no json\n")
    assert Partial(path, SAME).rows == {}


def test_a_fingerprint_tells_settings_model_code_and_files_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    extra = tmp_path / "model.json"
    extra.write_text("1")

    def now(settings="s", code=("layout.py",)):
        return fingerprint(settings, tmp_path, code, [extra])

    first = now()
    assert json.loads(json.dumps(first)) == first == now()
    assert differences(first, now(settings="t")) == ["settings"]
    assert differences(first, now(code=("layout.py", "policy.py"))) == ["code"]
    extra.write_text("2")
    assert differences(first, now()) == ["files"]
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert differences(first, now()) == ["model", "files"]
