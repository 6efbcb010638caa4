"""Compiles `kernels` into an object file: `python -m penstock.wire.compiler FILE`. The only module that needs numba.

It runs in a separate process, so that numba's seconds of work block no caller, and so that the code can be compiled for
any processor of this architecture: the object file works on every executor of the same kind of machine.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.wire.compiled import sealed, unsealed

PORTABLE = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
"""Environment under which numba compiles for the oldest processor of the architecture; the loops do not need more."""

READABLE = 0o644
"""Of the object file: its directory says who gets at it. An image is built by one user and used by another."""


def compile_kernels() -> bytes:
    """The kernels as one relocatable object file."""
    os.environ |= PORTABLE  # before numba is imported: it reads them then
    import llvmlite.binding as llvm

    modules = [llvm.parse_assembly(_assembly(*export)) for export in _exports()]
    for module in modules[1:]:
        modules[0].link_in(module)
    modules[0].verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="generic", opt=3, reloc="pic", codemodel="default")
    code: bytes = machine.emit_object(modules[0])
    return code


def _assembly(name: str, arguments: str, function: Callable[..., int]) -> str:
    """One C function as LLVM assembly. `arguments` has a letter each: b bytes, p 64-bit numbers, n a number."""
    from numba import cfunc, types

    pointer: Any = types.CPointer
    kinds = {"b": pointer(types.uint8), "p": pointer(types.int64), "n": types.int64}
    compiled = cfunc(types.int64(*(kinds[letter] for letter in arguments)), error_model="numpy")(function)
    text: str = compiled.inspect_llvm()
    return text.replace(compiled.native_name, name)


def _exports() -> list[tuple[str, str, Callable[..., int]]]:
    """C functions around the kernels: pointers and sizes in, arrays on to the kernels."""
    from numba import carray, njit  # type: ignore[attr-defined]  # its stubs leave carray out

    from penstock.wire import kernels
    from penstock.wire.layout import COLUMNS, STATE_SIZE

    # Called from compiled code only: without Python wrappers they compile in two thirds of the time.
    options: Any = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    for name, function in inspect.getmembers(kernels, inspect.isfunction):
        if function.__module__ == kernels.__name__ and not name.startswith("_"):
            setattr(kernels, name, njit(**options)(function))
    scan, gather, header_lines, group_names = (
        kernels.scan,
        kernels.gather,
        kernels.header_lines,
        kernels.group_names,
    )

    def scan_c(buf, size, state, table, rows, sid, direct, max_line, max_info, max_message):  # type: ignore[no-untyped-def]  # numba infers
        arrays = carray(buf, size), carray(state, STATE_SIZE), carray(table, (COLUMNS, rows))
        return scan(arrays[0], arrays[1], arrays[2], sid, direct, max_line, max_info, max_message)

    def gather_c(buf, size, at, sizes, rows, out, room):  # type: ignore[no-untyped-def]  # numba infers
        return gather(carray(buf, size), carray(at, rows), carray(sizes, rows), carray(out, room))

    def header_lines_c(buf, size, at, sizes, rows, found, parts, room):  # type: ignore[no-untyped-def]  # numba infers
        blocks = carray(buf, size), carray(at, rows), carray(sizes, rows)
        return header_lines(blocks[0], blocks[1], blocks[2], carray(found, room), carray(parts, (4, room)))

    def group_names_c(buf, size, found, parts, lines, order):  # type: ignore[no-untyped-def]  # numba infers
        return group_names(carray(buf, size), carray(found, lines), carray(parts, (4, lines)), carray(order, lines))

    return [
        ("penstock_scan", "bnppnnnnnn", scan_c),
        ("penstock_gather", "bnppnbn", gather_c),
        ("penstock_header_lines", "bnppnppn", header_lines_c),
        ("penstock_group_names", "bnppnp", group_names_c),
    ]


def write(path: Path) -> None:
    """Compile, and put the result in place in one step: a reader sees all of it or nothing.

    Only one process at a time compiles for a directory; the others wait, and find it done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file() and unsealed(path.read_bytes()):
            return
        code = sealed(compile_kernels())
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
            os.fchmod(file.fileno(), READABLE)
        os.replace(file.name, path)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
