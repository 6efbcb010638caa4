"""Resolves host names within a deadline.

The system's resolver cannot be interrupted, and waits for a silent name server as long as its own configuration says.
So it is called in a daemon thread that is never joined: neither by a caller whose time is over, nor at the end of an
event loop or of the process, as asyncio's own threads are.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Infos = list[tuple[Any, ...]]


def hosts(host: str, port: int, seconds: float) -> list[str]:
    """The addresses of a host, in the resolver's order. `TimeoutError` when it takes longer, `OSError` as it says."""
    if _is_address(host):
        return [host]
    answers: queue.SimpleQueue[Infos | OSError] = queue.SimpleQueue()
    _ask(lambda: _infos(host, port), answers.put)
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the name server does not answer about {host!r}") from None
    return _addresses(answer)


async def hosts_async(host: str, port: int) -> list[str]:
    """As `hosts`, for as long as the caller waits."""
    if _is_address(host):
        return [host]
    return _addresses(await asked(lambda: _infos(host, port)))


async def asked(look: Callable[[], Infos]) -> Infos | OSError:
    """Call a resolver's function in a daemon thread, and return its result or its error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Infos | OSError] = loop.create_future()

    def settle(answer: Infos | OSError) -> None:
        if not future.done():
            future.set_result(answer)

    def tell(answer: Infos | OSError) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(settle, answer)

    _ask(look, tell)
    return await future


def _ask(look: Callable[[], Infos], tell: Callable[[Infos | OSError], None]) -> None:
    def ask() -> None:
        try:
            answer: Infos | OSError = look()
        except OSError as exc:
            answer = exc
        except UnicodeError as exc:  # a label that is too long, or none
            answer = OSError(f"not a host name ({exc})")
        tell(answer)

    threading.Thread(target=ask, name="penstock-resolver", daemon=True).start()


def _infos(host: str, port: int) -> Infos:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _addresses(answer: Infos | OSError) -> list[str]:
    if isinstance(answer, OSError):
        raise answer
    return list(dict.fromkeys(str(info[4][0]) for info in answer))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
