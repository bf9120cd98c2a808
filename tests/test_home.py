"""Where HOME cannot be written to, caches go elsewhere."""

import os
import stat
from pathlib import Path

import pytest

from pat import home


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(home.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"pat-home-{os.getuid()}"


def test_a_home_that_can_be_written_to_stays(monkeypatch, tmp_path, elsewhere, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    home.ensure()
    assert os.environ["HOME"] == str(tmp_path)
    assert not elsewhere.exists()
    assert not capsys.readouterr().out


def test_another_is_private_and_said(monkeypatch, elsewhere, capsys):
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    home.ensure()
    assert os.environ["HOME"] == str(elsewhere)
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    assert f"HOME=/dev/null/nowhere cannot be written to: caches go to {elsewhere}" in capsys.readouterr().out


def test_a_folder_of_another_user_is_not_taken(monkeypatch, elsewhere):
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    elsewhere.mkdir()
    mine = os.getuid()
    monkeypatch.setattr(home.os, "getuid", lambda: mine + 1)
    Path(f"{str(elsewhere).removesuffix(str(mine))}{mine + 1}").mkdir()
    with pytest.raises(PermissionError, match="is another user's: set HOME"):
        home.ensure()
