"""Which object files are trusted: what lies there is executed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.wire import compiled, compiler

CODE = compiled.sealed(b"machine code")
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make files of another user")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The named directory, with an object file in it; nothing is found elsewhere."""
    made = tmp_path / "cache"
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(made))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    made.mkdir(mode=0o755)
    file = made / compiled.file_name()
    file.write_bytes(CODE)
    file.chmod(0o644)
    return made


def linked_directory(cache: Path) -> None:
    cache.rename(cache.parent / "theirs")
    cache.symlink_to(cache.parent / "theirs")


def linked_file(cache: Path) -> None:
    file = cache / compiled.file_name()
    file.rename(cache / "theirs")
    file.symlink_to(cache / "theirs")


def writable_directory(cache: Path) -> None:
    cache.chmod(0o777)


def writable_file(cache: Path) -> None:
    (cache / compiled.file_name()).chmod(0o666)


def pipe(cache: Path) -> None:
    (cache / compiled.file_name()).unlink()
    os.mkfifo(cache / compiled.file_name())


def damaged(cache: Path) -> None:
    (cache / compiled.file_name()).write_bytes(CODE[:-1])


def no_directory(cache: Path) -> None:
    (cache / compiled.file_name()).unlink()
    cache.rmdir()
    cache.write_bytes(b"")


def test_code_of_our_own_is_used(cache: Path) -> None:
    assert compiled.machine_code() == b"machine code"


SPOILED = [linked_directory, linked_file, writable_directory, writable_file, pipe, damaged, no_directory]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_code_that_another_may_have_put_there_is_not(cache: Path, spoil: Callable[[Path], None]) -> None:
    spoil(cache)
    assert compiled.machine_code() is None


@as_root
@pytest.mark.parametrize("part", ["directory", "file"])
def test_code_of_another_user_is_not(cache: Path, part: str) -> None:
    os.chown(cache if part == "directory" else cache / compiled.file_name(), NOBODY, NOBODY)
    assert compiled.machine_code() is None


def found_by_nobody(modes: tuple[int, int], cache: str, answer: multiprocessing.SimpleQueue[object]) -> None:
    os.environ[compiled.CACHE_VARIABLE] = cache
    Path(cache, compiled.file_name()).chmod(modes[1])
    Path(cache).chmod(modes[0])
    os.seteuid(NOBODY)
    try:
        answer.put(compiled.machine_code())
    except OSError as exc:
        answer.put(repr(exc))


@as_root
@pytest.mark.parametrize(
    ("modes", "found"), [((0o755, 0o644), b"machine code"), ((0o755, 0o600), None), ((0o700, 0o600), None)]
)
def test_a_cache_of_roots_is_read_by_others_or_counts_as_none(modes: tuple[int, int], found: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as above:  # pytest's own folders are for their owner alone
        os.chmod(above, 0o755)
        cache = Path(above, "cache")
        cache.mkdir()
        (cache / compiled.file_name()).write_bytes(CODE)
        forked = multiprocessing.get_context("fork")
        answer: multiprocessing.SimpleQueue[object] = forked.SimpleQueue()
        child = forked.Process(target=found_by_nobody, args=(modes, str(cache), answer))
        child.start()
        child.join(30)
        assert answer.get() == found


def test_no_directory_is_shared_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compiled.cache_directories() == [Path("/home/ann/.cache/penstock")]


def test_a_named_cache_is_made_for_all_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "image" / "cache"
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(named))
    monkeypatch.setattr(compiler, "compile_kernels", lambda: b"code")
    before = os.umask(0o077)
    try:
        compiler.write(compiled._writable_directory() / compiled.file_name())
    finally:
        os.umask(before)
    assert (named.stat().st_mode & 0o777, (named / compiled.file_name()).stat().st_mode & 0o777) == (0o755, 0o644)
    assert compiled.machine_code() == b"code"


def test_a_named_cache_is_filled_although_our_own_has_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is built by a user who has read something before."""
    home, named = tmp_path / "penstock", tmp_path / "image"
    home.mkdir(mode=0o700)
    (home / compiled.file_name()).write_bytes(CODE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(named))
    copied = ["install", "-D", "-t", str(named), "-m", "644", str(home / compiled.file_name())]
    monkeypatch.setattr(compiled, "_start_compiler", lambda _: subprocess.Popen(copied, stderr=subprocess.PIPE))
    compiled.warm()
    assert (named / compiled.file_name()).read_bytes() == CODE
    assert compiled.machine_code() == b"machine code"
    monkeypatch.setattr(compiled, "_start_compiler", None)
    compiled.warm()  # nothing is left to do


def test_a_build_that_takes_longer_than_a_second_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(complaints: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=complaints)

    monkeypatch.setattr(compiled, "_start_compiler", slow)
    monkeypatch.setattr(compiled, "_code_in", lambda _: None)
    monkeypatch.setattr(compiled, "TOLD_AFTER", 0.05)
    monkeypatch.setattr(compiled, "_machine", None)
    monkeypatch.setattr(compiled, "_compiling", None)
    monkeypatch.setattr(compiled, "_tell_at", compiled._tell_at)
    with caplog.at_level(logging.WARNING):
        compiled.prepare()
        process = compiled._compiling
        assert process
        while not caplog.records:  # as a task does, block by block
            compiled.current()
        compiled.current()
        process.kill()
        process.wait()
        assert [record.getMessage() for record in caplog.records] == [compiled.TOLD]
        with pytest.raises(compiled.CompileFailed, match="took more than"):
            compiled.warm(0.2)
        assert [record.getMessage() for record in caplog.records] == [compiled.TOLD] * 2


def test_a_link_that_appears_meanwhile_changes_no_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder, somebody else may be quicker than we with the name of the cache."""
    private, cache = tmp_path / "private", tmp_path / "cache"
    private.mkdir(mode=0o700)
    cache.symlink_to(private)
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as it was a moment ago
    assert compiled._writable_directory() == tmp_path / "home" / "penstock"
    assert private.stat().st_mode & 0o777 == 0o700
