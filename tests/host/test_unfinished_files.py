"""Files of processes that are killed while they write: the next writer or reader removes them, and no other."""

import itertools
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from zinc_attn import files


def killed(path: Path, moment: int) -> bool:
    """A process that writes ``path`` is killed before so many lines of files.py; False: it has fewer."""
    if (child := os.fork()) == 0:
        lines = itertools.count()

        def kill(frame: FrameType, *_: object) -> Any:
            if frame.f_code.co_filename == files.__file__ and next(lines) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return kill

        sys.settrace(kill)
        with files.replacing(path, 0o600) as file:
            file.write(b"whole")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_what_killed_processes_leave_is_removed(tmp_path):
    path, left = tmp_path / ("n" * 255), 0
    others = {tmp_path / name for name in (".0123456789abcdef.tmp", ".other.0.tmp")}
    for other in others:
        other.touch()
    for moment in itertools.count():
        if not killed(path, moment):
            break
        unfinished = {*tmp_path.iterdir()} - others - {path}
        left += len(unfinished)
        assert not path.exists() or path.read_bytes() == b"whole"
        if moment % 2:
            files.remove_unfinished(path)
        else:
            with files.replacing(path) as file:
                file.write(b"whole")
            assert path.read_bytes() == b"whole"
            path.unlink()
        assert {*tmp_path.iterdir()} <= others | {path}
    assert moment > 20 and left > 5


def test_the_file_of_a_writer_that_lives_stays(tmp_path):
    """Also in the same process, until it has its name; the last one to end counts."""
    path = tmp_path / "file"
    with files.replacing(path) as first:
        first.write(b"first")
        with files.replacing(path) as second:
            files.remove_unfinished(path)
            second.write(b"second")
        assert path.read_bytes() == b"second" and len(os.listdir(tmp_path)) == 2
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_a_file_that_was_removed_before_it_was_locked(tmp_path, monkeypatch):
    """Another process took it for a killed one's: the writer begins again."""
    path, lock, seen = tmp_path / "file", files.fcntl.flock, list[str]()

    def removed_first(file, how):
        if not seen:
            seen.append(file.name)
            os.unlink(file.name)
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", removed_first)
    with files.replacing(path) as file:
        file.write(b"whole")
        assert file.name != str(seen[0])
    assert path.read_bytes() == b"whole" and os.listdir(tmp_path) == ["file"]
