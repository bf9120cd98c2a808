"""Shared folders: where there is room, and an error that says where there is none."""

import errno
import os
import shutil

import pytest

from pat.engine import shared
from pat.engine.shared import NoRoom, allocate, is_shared_folder, require_room, shared_folder


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """Two roots with 100 and 1000 bytes free, in the place of shared memory and of temporary files."""
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    free = {memory: 100, temporary: 1000}
    for root in free:
        root.mkdir()
    monkeypatch.setattr(shared, "MEMORY", memory)
    monkeypatch.setattr(shared.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(shared, "_free", lambda folder: free[folder])
    return memory, temporary


@pytest.mark.parametrize(("needed", "where"), [(0, 0), (100, 0), (101, 1), (1000, 1)])
def test_the_first_folder_with_room_is_taken(roots, needed, where):
    folder = shared_folder("test", needed)
    assert folder.parent == roots[where]
    assert is_shared_folder(folder)
    assert not is_shared_folder(folder.with_name("pat-model"))  # a user's own


def test_without_room_the_error_names_folders_bytes_and_the_way_out(roots):
    with pytest.raises(NoRoom) as caught:
        shared_folder("test", 5000)
    text = str(caught.value)
    for part in ("pat (test)", "5,000 bytes", f"{roots[0]} has 100", f"{roots[1]} has 1,000", "--shm-size", "TMPDIR"):
        assert part in text
    assert caught.value.errno == errno.ENOSPC
    assert not list(roots[0].iterdir())


def test_what_a_dead_process_left_is_removed_wherever_it_is(roots):
    left = shared_folder("test", 500)
    parts = left.name.rsplit("-", 2)
    dead = left.rename(left.with_name(f"{parts[0]}-{2**22 + 1}-{parts[2]}"))  # no process has such a number
    shared_folder("test")
    assert not dead.exists()


def test_room_is_asked_for_before_a_write(roots):
    require_room(roots[0], "a bucket", 100)
    with pytest.raises(NoRoom, match="a bucket needs a folder with 101 bytes"):
        require_room(roots[0], "a bucket", 101)


def test_an_allocated_file_has_memory_behind_it_and_one_without_is_an_error(tmp_path, monkeypatch):
    allocate(tmp_path / "file", 1 << 20)
    found = os.stat(tmp_path / "file")
    assert found.st_size == 1 << 20 <= 512 * found.st_blocks
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(NoRoom, match="large needs a folder with 1,048,576 bytes free"):
        allocate(tmp_path / "large", 1 << 20)
    assert not (tmp_path / "large").exists()
    shutil.rmtree(tmp_path)
