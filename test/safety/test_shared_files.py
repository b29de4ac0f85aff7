"""Files in memory and those of dead owners, on a machine of the test's making."""

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from vla_edge.core import shared_buffer
from vla_edge.core.shared_buffer import SharedMemoryFile, memory_dir, process_start, remove_leftovers

# ------------------------------------------------------------------ where files lie


@pytest.mark.parametrize("is_dir, writable, shared", [
    (True, True, True), (True, False, False), (False, True, False), (False, False, False)])
def test_memory_lies_in_dev_shm_if_that_can_be_written(monkeypatch, is_dir, writable, shared):
    asked = []
    monkeypatch.setattr(Path, "is_dir", lambda self: is_dir)
    monkeypatch.setattr(shared_buffer.os, "access", lambda path, mode: asked.append((str(path), mode)) or writable)
    monkeypatch.setattr(shared_buffer.tempfile, "gettempdir", lambda: "/temporary")
    assert memory_dir() == Path("/dev/shm" if shared else "/temporary")
    assert asked == ([("/dev/shm", os.W_OK)] if is_dir else [])


def test_without_a_folder_the_memory_dir_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_buffer, "memory_dir", lambda: tmp_path)
    made = SharedMemoryFile.create("arm1", 64)
    assert made.path.parent == tmp_path and made.path.exists()
    made.close()
    made.path.rename(tmp_path / f"vla-edge.arm1.{os.getpid()}.1")
    assert remove_leftovers() == [tmp_path / f"vla-edge.arm1.{os.getpid()}.1"]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_private_reserved_zeroed_and_named_after_its_owner(tmp_path):
    """Reserved: pages that do not exist yet would be a SIGBUS in the motor loop when memory runs out."""
    before = open_descriptors()
    made = SharedMemoryFile.create("arm_1", 70_000, tmp_path)
    found = made.path.stat()
    assert made.path.name == f"vla-edge.arm_1.{os.getpid()}.{process_start(os.getpid())}"
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_size == 70_000 and found.st_blocks * 512 >= 70_000
    assert len(made.buffer) == 70_000 and set(made.buffer[:]) == {0}
    made.buffer[5] = 7
    assert made.path.read_bytes()[5] == 7
    other = SharedMemoryFile.open(made.path)
    assert other.path == made.path and len(other.buffer) == 70_000 and other.buffer[5] == 7
    other.buffer[6] = 8
    assert made.buffer[6] == 8
    other.close()
    made.close()
    assert open_descriptors() == before
    made.unlink()
    made.unlink()
    assert not made.path.exists()


def test_no_child_process_inherits_a_descriptor(monkeypatch, tmp_path):
    flags, real = [], os.open
    monkeypatch.setattr(shared_buffer.os, "open", lambda path, how, *mode: flags.append(how) or real(path, how, *mode))
    made = SharedMemoryFile.create("test", 64, tmp_path)
    SharedMemoryFile.open(made.path).close()
    made.close()
    assert flags == [os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, os.O_RDWR | os.O_CLOEXEC]


def test_a_file_that_cannot_be_reserved_leaves_nothing_open(monkeypatch, tmp_path):
    def full(descriptor, offset, length):
        assert (offset, length) == (0, 4096)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_buffer.os, "posix_fallocate", full)
    before = open_descriptors()
    with pytest.raises(OSError, match="No space"):
        SharedMemoryFile.create("test", 4096, tmp_path)
    assert open_descriptors() == before and not list(tmp_path.iterdir())


def test_a_file_that_vanished_while_it_was_refused_is_no_second_error(monkeypatch, tmp_path):
    def full(descriptor, offset, length):
        next(tmp_path.iterdir()).unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_buffer.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        SharedMemoryFile.create("test", 4096, tmp_path)


# ------------------------------------------------------------------ who owns a file


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A root of files instead of this machine's: returns the folder that stands for /proc."""
    monkeypatch.setattr(shared_buffer, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/stat").write_text("")
    return proc


def stat_line(state="S", start="777", name=b"python"):
    """As in proc(5): id, (name), state, ..., the 22nd field is the start time."""
    return b"42 (" + name + b") " + " ".join([state, *(str(n) for n in range(4, 22)), start, "23", "24"]).encode()


def in_proc(machine, line):
    (machine / "42").mkdir()
    (machine / "42/stat").write_bytes(line)


@pytest.mark.parametrize("line, start", [
    (stat_line(), "777"), (stat_line(state="R", start="5"), "5"),
    (stat_line(state="Z"), None), (stat_line(state="X"), None),  # ended, not waited for yet
    (stat_line(name=b"a) Z 1 2 (b"), "777"), (stat_line(name=b"\xff\xfe"), "777"),  # names may hold anything
    (b"42 (cut", "0"), (b"42 (cut) S 4 5", "0"), (b"42 (cut)", "0"),
])
def test_a_process_is_known_by_its_start_time(machine, line, start):
    in_proc(machine, line)
    assert process_start(42) == start


def test_a_process_without_an_entry_is_dead(machine):
    assert process_start(42) is None


def test_an_entry_that_cannot_be_read_belongs_to_someone(machine, monkeypatch):
    (machine / "42/stat").mkdir(parents=True)  # reading a folder is an OSError
    assert process_start(42) == "0"


@pytest.mark.parametrize("error, start", [(None, "0"), (ProcessLookupError, None), (PermissionError, "0")])
def test_without_proc_a_signal_of_nothing_asks(machine, monkeypatch, error, start):
    (machine / "self/stat").unlink()
    asked = []

    def kill(pid, number):
        asked.append((pid, number))
        if error is not None:
            raise error

    monkeypatch.setattr(shared_buffer.os, "kill", kill)
    assert process_start(42) == start and asked == [(42, 0)]


# ------------------------------------------------------------------ leftovers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Process 42 lives and started at 777; no other does."""
    monkeypatch.setattr(shared_buffer, "process_start", lambda pid: "777" if pid == 42 else None)
    return tmp_path


def test_a_file_whose_owner_lives_stays_and_so_does_what_is_not_ours(folder):
    keep = ["vla-edge.arm1.42.777", "vla-edge.arm1.x42.777", "vla-edge.arm1.777", "vla-edge.arm1.7.777.bak",
            "vla-edge.7.arm1.777", "other.arm1.7.777", "vla-edges.arm1.7.777"]
    remove = ["vla-edge.arm1.42.776", "vla-edge.arm1.7.777", "vla-edge.arm2.8.0", "vla-edge.arm1.7.x"]
    for name in (*keep, *remove):
        (folder / name).write_bytes(b"x")
    assert sorted(path.name for path in remove_leftovers(folder)) == sorted(remove)
    assert sorted(path.name for path in folder.iterdir()) == sorted(keep)


def test_a_leftover_that_another_process_removed_first_is_not_ours(folder, monkeypatch):
    (folder / "vla-edge.arm1.7.777").write_bytes(b"x")
    real = Path.unlink

    def unlink(self, missing_ok=False):
        real(self)
        raise FileNotFoundError(errno.ENOENT, "gone", str(self))

    monkeypatch.setattr(Path, "unlink", unlink)
    assert remove_leftovers(folder) == []


def test_a_leftover_that_cannot_be_removed_is_named_once_and_kept(folder, monkeypatch, caplog):
    path = folder / "vla-edge.arm1.7.777"
    path.write_bytes(b"x")

    def unlink(self, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", unlink)
    with caplog.at_level(logging.WARNING):
        assert remove_leftovers(folder) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot remove {path} left by a killed process: [Errno 13] Permission denied"]
    monkeypatch.undo()
    assert path.exists()
