"""Machine code for `kernels`: compiled once for a source version, loaded in milliseconds wherever it is needed.

Why not `numba.njit(cache=True)`: every executor would import numba (0.4 s, under load 2 s) and, with a cold or
unwritable cache, compile for 10 s inside a task. Instead `compiler` compiles in a process of its own, for the generic
processor of the architecture, and keeps an object file; other processes load that with llvmlite alone (0.2 s, most of
it the import). The file depends on nothing but source, architecture and operating system, so the driver sends it along
with the tasks (`machine_code`, then `offer` on the executor), and executors do not compile at all.

Where there is no object file, `plain` does the work while a background process compiles: no task waits for a compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from penstock.errors import PenstockError
from penstock.wire import plain

CACHE_VARIABLE = "PENSTOCK_CACHE"
"""Names the directory of object files; set it when an image is built, and run `python -m penstock.wire.compiled`."""
COMPILE_WITHIN = 300.0  # seconds
TOLD_AFTER = 1.0  # seconds
TOLD = (
    "compiling the reader's machine code, once for this version on this machine; reading is slower until then "
    f"(an image can bring it: {CACHE_VARIABLE})"
)
DIGEST_BYTES = 32
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
EXPORTS = {"penstock_scan": 10, "penstock_gather": 7, "penstock_header_lines": 8, "penstock_group_names": 6}
"""The functions of the object file, and how many arguments each has; all are 64 bits wide."""
NEVER_CALLED = (
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
"""What numba's code for exceptions refers to. The kernels raise none, but the loader wants an address for each."""

Array = np.ndarray[Any, Any]

log = logging.getLogger(__name__)


class CompileFailed(PenstockError):
    """The kernels could not be compiled. Reading still works, at less than half the speed."""


class Kernels(Protocol):
    """What a scan needs, as machine code or plain. `kernels` says what each function does."""

    def scan(self, buf: Array, state: Array, table: Array, *numbers: int) -> int: ...
    def gather(self, buf: Array, at: Array, size: Array, out: Array) -> int: ...
    def header_lines(self, buf: Array, at: Array, size: Array, rows: Array, parts: Array) -> int: ...
    def group_names(self, buf: Array, rows: Array, parts: Array, order: Array) -> int: ...


class MachineKernels:
    """The kernels as machine code. Calls release the interpreter lock; arrays must be contiguous."""

    def __init__(self, code: bytes) -> None:
        import llvmlite.binding as llvm  # 0.15 s: only where machine code is used

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        _fill_in_symbols(llvm)
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        # The engine owns the memory of the code: it must live as long as this object.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        functions = (self._function(name, arguments) for name, arguments in EXPORTS.items())
        self._scan, self._gather, self._header_lines, self._group_names = functions

    def _function(self, name: str, arguments: int) -> Callable[..., int]:
        address = self._engine.get_function_address(name)
        if not address:
            raise CompileFailed(f"the object file of the kernels lacks {name}; remove {cache_directories()}")
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address)

    def scan(self, buf: Array, state: Array, table: Array, *numbers: int) -> int:
        return self._scan(_at(buf), len(buf), _at(state), _at(table), table.shape[1], *numbers)

    def gather(self, buf: Array, at: Array, size: Array, out: Array) -> int:
        return self._gather(_at(buf), len(buf), _at(at), _at(size), len(at), _at(out), len(out))

    def header_lines(self, buf: Array, at: Array, size: Array, rows: Array, parts: Array) -> int:
        return self._header_lines(_at(buf), len(buf), _at(at), _at(size), len(at), _at(rows), _at(parts), len(rows))

    def group_names(self, buf: Array, rows: Array, parts: Array, order: Array) -> int:
        return self._group_names(_at(buf), len(buf), _at(rows), _at(parts), len(rows), _at(order))


def _at(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _fill_in_symbols(llvm: Any) -> None:
    abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in NEVER_CALLED:
        if not llvm.address_of_symbol(name):
            llvm.add_symbol(name, abort)


# -- which kernels to use ----------------------------------------------------------------------------------------------

PLAIN = cast(Kernels, plain)
_machine: MachineKernels | None = None
_compiling: subprocess.Popen[bytes] | None = None
_tell_at = math.inf
"""When to log that the compiler is still running."""
_unusable = False


def current() -> Kernels:
    """Return the best kernels available now. Never waits: without machine code it starts the compiler, and returns the
    plain ones."""
    if _machine is None and (code := machine_code()):
        _load(code)
    if _machine is None:
        prepare()
        _tell()
    return _machine or PLAIN


def _load(code: bytes) -> None:
    global _machine, _unusable
    if _unusable:
        return
    try:
        _machine = MachineKernels(code)
    except (
        CompileFailed,
        ImportError,
        OSError,
        RuntimeError,
    ) as exc:  # llvmlite raises RuntimeError for all of its own
        _unusable = True
        log.warning("machine code for the reader cannot be used here, reading is slower: %s", exc)


def prepare() -> None:
    """Start to compile in the background, unless there is machine code or a compiler runs."""
    global _compiling, _tell_at
    if _compiling is None and not machine_code():
        with suppress(CompileFailed):  # no directory for the code: use the plain kernels
            _compiling = _start_compiler(subprocess.DEVNULL)
            _tell_at = time.monotonic() + TOLD_AFTER


def _tell() -> None:
    """Log once that the background compiler takes longer than a second."""
    global _tell_at
    if time.monotonic() >= _tell_at and _compiling and _compiling.poll() is None:
        _tell_at = math.inf
        log.warning(TOLD)


def warm(within: float = COMPILE_WITHIN) -> None:
    """Compile machine code if there is none. For image builds and tests, not for tasks.

    If a directory is configured, the code is stored there, even if our own cache has it: other users cannot read that.
    """
    if _code_in(cache_directories()[0]):
        return
    process = _start_compiler(subprocess.PIPE)
    try:
        complaint = _complaint(process, within)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise CompileFailed(f"compiling the kernels took more than {within:g} s") from None
    if process.returncode:
        raise CompileFailed(f"compiling the kernels failed: {complaint.decode(errors='replace')[-2000:]}")


def _complaint(process: subprocess.Popen[bytes], within: float) -> bytes:
    """Return what the compiler wrote to stderr. Logs when it takes longer than a second."""
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=min(TOLD_AFTER, within))[1]
    log.warning(TOLD)
    return process.communicate(timeout=max(within - TOLD_AFTER, 0))[1]


def machine_code() -> bytes | None:
    """Return the object file, if a trusted user compiled it on this machine. An unreadable file counts as missing."""
    return next((code for directory in cache_directories() if (code := _code_in(directory))), None)


def _code_in(directory: Path) -> bytes | None:
    try:
        return unsealed(_trusted_bytes(directory, file_name()))
    except OSError:
        return None


def _trusted_bytes(directory: Path, name: str) -> bytes:
    """Read a file that only we, or root, can have written. The open descriptor is checked, and no link is followed:
    between a check of a path and its use, another user may replace the file. Raises `OSError`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with _opened(directory) as folder, os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        _require_trusted(file.fileno(), stat.S_ISREG)
        return file.read()


def _require_trusted(descriptor: int, is_kind: Callable[[int], bool]) -> None:
    """Raise unless only we, or root, can write there: the content is executed."""
    found = os.fstat(descriptor)
    if not is_kind(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & OTHERS_WRITE:
        raise PermissionError("somebody else can write there")


def sealed(code: bytes) -> bytes:
    """The code as it is kept in a file: with its digest before it."""
    return hashlib.sha256(code).digest() + code


def unsealed(data: bytes) -> bytes | None:
    """The code of a file, unless it is damaged: LLVM would end the process over it."""
    digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def offer(name: str, code: bytes) -> None:
    """Use machine code that another process on the same kind of machine compiled, if there is none yet."""
    if _machine is None and name == file_name():
        _load(code)


@cache
def file_name() -> str:
    """Changes with the source of the kernels, the architecture and the operating system, and with nothing else."""
    digest = hashlib.sha256()
    for source in ("kernels.py", "layout.py", "compiler.py"):
        digest.update(resources.files("penstock.wire").joinpath(source).read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}-{platform.system()}-{platform.machine()}.o".lower()


def cache_directories() -> list[Path]:
    """Where object files are looked for, and the first that can be written is where they are put.

    None is in a folder that is shared with others. Where there is none at all, reading stays plain.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [*_named_directory(), home / "penstock"]


def _named_directory() -> list[Path]:
    return [Path(os.environ[CACHE_VARIABLE])] if os.environ.get(CACHE_VARIABLE) else []


def _start_compiler(complaints: int) -> subprocess.Popen[bytes]:
    """Compile in a process of its own; the object file appears in the cache when it is done."""
    target = _writable_directory() / file_name()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "penstock.wire.compiler", str(target)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=complaints)


def _writable_directory() -> Path:
    for directory in cache_directories():
        with suppress(OSError):
            _make(directory, 0o755 if directory in _named_directory() else 0o700)  # a named one is for others, too
            if _is_ours(directory):
                return directory
    raise CompileFailed(f"none of {cache_directories()} can be written by us alone; name one with {CACHE_VARIABLE}")


def _make(directory: Path, mode: int) -> None:
    """Create the directory unless the path exists, whose mode is not changed: it may be another user's."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        with _opened(directory) as folder:
            os.fchmod(folder, mode)


def _is_ours(directory: Path) -> bool:
    with _opened(directory):
        return os.access(directory, os.W_OK)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A directory that only we, or root, can have written to. Raises `OSError`."""
    folder = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_trusted(folder, stat.S_ISDIR)
        yield folder
    finally:
        os.close(folder)


if __name__ == "__main__":
    warm()
    print(file_name())
