"""A checkpoint and torch_fastdet's file beside it are complete or absent, and belong together."""

import errno
import fcntl
import hashlib
import os
import pickle
import random
import resource
import stat
import time

import pytest
import torch

from tests.forks import exit_status, fork
from torch_fastdet.switches.resume_exact import files


def save(path, number):
    state = {"number": number, "weights": torch.full((64,), float(number))}
    files.write_checkpoint(path, lambda made: made.write_bytes(b"checkpoint %d" % number * 1000), lambda: state)


@pytest.mark.parametrize("operation", ["replace", "fsync", "unlink"])
def test_killed_while_writing_leaves_a_checkpoint_and_its_file(tmp_path, operation, monkeypatch):
    """The process ends before each call of the operation as by SIGKILL: no Python code runs after that."""
    path = tmp_path / "last.pt"
    save(path, 1)
    made = getattr(os, operation)
    for calls in range(1, 9):

        def save_until_killed(left=calls, number=1 + calls):
            def dying(*arguments, **keywords):
                nonlocal left
                left -= 1
                if not left:
                    os._exit(7)
                return made(*arguments, **keywords)

            setattr(os, operation, dying)
            save(path, number)

        ended = exit_status(fork(save_until_killed))
        number = files.read(path)["number"]
        assert path.read_bytes() == b"checkpoint %d" % number * 1000
        if ended == 0:
            break
        assert ended == 7
    assert ended == 0 and number == 1 + calls > 2, "not every call was tried"
    monkeypatch.setattr(files, "LEFT_AFTER", 0)
    save(path, 99)
    assert sorted(other.name for other in tmp_path.iterdir()) == sorted(
        {"last.pt", *(p.name for p in tmp_path.glob("*.resume"))}
    )
    assert len(list(tmp_path.glob("*.resume"))) == 1, "files of earlier checkpoints are left"


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    """Files behind a link with such a folder's name stay, and so does a folder that is being written now."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/thesis.tex").write_text("x")
    for name in (".torch_fastdet_writing", f"{files.WRITING}link"):
        (tmp_path / name).symlink_to("victim")
    ages = {"killed": 9, "lives": 9, "new": -60, "old": files.LEFT_AFTER}  # the last lives too, as far as its lock says
    for name, age in ages.items():
        folder = tmp_path / f"{files.WRITING}{name}"
        folder.mkdir()
        (folder / "last.pt").write_text("half of it")
        os.utime(folder, (time.time() - age,) * 2)
    os.utime(tmp_path / f"{files.WRITING}link", (0, 0), follow_symlinks=False)
    locks = [os.open(tmp_path / f"{files.WRITING}{name}", os.O_RDONLY) for name in ("lives", "old")]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    save(tmp_path / "last.pt", 1)
    assert files.read(tmp_path / "last.pt")["number"] == 1
    assert (tmp_path / "victim/thesis.tex").read_text() == "x"
    assert [name for name in ages if (tmp_path / f"{files.WRITING}{name}/last.pt").exists()] == ["lives", "new"]
    for lock in locks:
        os.close(lock)
    files.forget(tmp_path / "last.pt")  # the training is over
    assert [name for name in ages if (tmp_path / f"{files.WRITING}{name}/last.pt").exists()] == ["new"]


def test_two_trainings_in_one_folder(tmp_path):
    """Two trainings, started twice or with --exist-ok, both continue and leave a complete checkpoint."""
    path = tmp_path / "last.pt"
    running = [fork(lambda first=first: [save(path, first + i) for i in range(60)] and None) for first in (0, 1000)]
    assert [exit_status(process) for process in running] == [0, 0]
    number = int(path.read_bytes().split()[1].removesuffix(b"checkpoint"))
    assert number in (59, 1059) and path.read_bytes() == b"checkpoint %d" % number * 1000
    save(path, 7)
    assert sorted(other.suffix for other in tmp_path.iterdir()) == [".pt", ".resume"]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path):
    """last.pt may lie on another disk."""
    path, target = tmp_path / "last.pt", tmp_path / "disk/run7.pt"
    target.parent.mkdir()
    target.write_bytes(b"old")
    target.chmod(0o640)
    path.symlink_to("disk/run7.pt")
    save(path, 1)
    assert path.is_symlink() and target.read_bytes() == b"checkpoint 1" * 1000
    assert files.read(path)["number"] == 1 and target.stat().st_mode & 0o777 == 0o640
    save(tmp_path / "new.pt", 1)
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "new.pt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    """vboxsf and some FUSE file systems return EINVAL."""
    made = os.fsync

    def fsync(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        made(number)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path / "last.pt", 1)
    assert files.read(tmp_path / "last.pt")["number"] == 1


def test_disk_that_is_full_at_any_byte(tmp_path):
    """A limit on file sizes makes the system return a real error in the middle of a write."""
    path = tmp_path / "last.pt"

    def save(text):
        state = {"text": text, "weights": torch.ones(64)}
        files.write_checkpoint(path, lambda made: made.write_bytes(text.encode()), lambda: state)

    save("one")
    before = {other.name: other.read_bytes() for other in tmp_path.iterdir()}
    longest = max(map(len, before.values()))
    for size in [0, 1, 2, *range(3, longest, 97), longest - 1, longest]:

        def save_within(size=size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                save("two")
            except OSError:
                return 3

        ended = exit_status(fork(save_within))
        assert ended == (3 if size < longest else 0)
        if ended:
            assert {other.name: other.read_bytes() for other in tmp_path.iterdir()} == before
    assert files.read(path)["text"] == "two" and path.read_text() == "two"


def test_file_of_another_checkpoint_is_not_used(tmp_path):
    path = tmp_path / "last.pt"
    save(path, 1)
    path.write_bytes(b"somebody else's")
    with pytest.raises(files.NotOurs, match=r"^the file last\.[0-9a-f]{16}\.resume beside last\.pt belongs to another"):
        files.read(path)
    files.forget(path)
    with pytest.raises(files.NotOurs, match=r"is not there\.$"):
        files.read(path)


class Code:
    def __reduce__(self):
        return print, ("code of the file has run",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_mutated_files_are_refused_and_run_no_code(tmp_path, capsys, mutations=300):
    path = tmp_path / "last.pt"
    save(path, 1)
    (ours,) = tmp_path.glob("*.resume")
    whole, generator = ours.read_bytes(), random.Random(0)
    head = len(files.MAGIC) + 64
    refused = 0
    for attempt in range(mutations):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        if attempt % 2 and len(data) > head:  # by somebody who knows the format
            data[:head] = whole[: head - 32] + hashlib.sha256(data[head:]).digest()
        ours.write_bytes(bytes(data))
        try:
            assert isinstance(files.read(path), dict)
        except files.NotOurs as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > mutations / 2
    payload = pickle.dumps(Code())
    ours.write_bytes(whole[: head - 32] + hashlib.sha256(payload).digest() + payload)
    with pytest.raises(files.NotOurs):
        files.read(path)
    assert "has run" not in capsys.readouterr().out
