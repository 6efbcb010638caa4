"""A process that ends in the middle of its requests, inside this one."""

from __future__ import annotations

from penstock.jetstream.api import Requester


class Dead(Exception):
    """Stands for the end of the process."""


def dying(ask: Requester, left: int) -> Requester:
    """Requests as `ask` makes them, of which the one after `left` and all later ones raise `Dead`."""

    async def request(subject: str, payload: bytes, timeout: float) -> bytes:
        nonlocal left
        if left == 0:
            raise Dead
        left -= 1
        return await ask(subject, payload, timeout)

    return request
