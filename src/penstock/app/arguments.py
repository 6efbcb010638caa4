"""Binds the arguments of a handler by the annotations and names of its parameters, once, when it is declared."""

from __future__ import annotations

import contextvars
import inspect
import typing
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from penstock.app import payloads
from penstock.app.message import Message
from penstock.consume import messages
from penstock.consume.handlers import is_async, refuse_generators
from penstock.consume.messages import MessageContext
from penstock.consume.threads import Threads
from penstock.consume.verdicts import Reject
from penstock.errors import ConfigError

Call = Callable[[Any], Awaitable[Any]]
"""Takes a message, or a list of them."""
MAX_THREADS = 64
"""Maximum threads of one handler that is a plain function."""
Getter = Callable[[Message], Any]


def bind(handler: Callable[..., Any], state: SimpleNamespace, in_batches: bool = False, threads: int = 16) -> Call:
    """Return a call that takes a message and calls the handler with the arguments it declares.

    A parameter annotated with `Message`, or named `message`, is the message; one annotated with `MessageContext`, or
    named `context`, its context; one named `state` is the app's; any other with a type that data can be parsed into is
    the payload. In batches each is a list. Raises `ConfigError` for a parameter that cannot be bound. A plain function
    runs in one of `threads`.
    """
    refuse_generators(handler, getattr(handler, "__qualname__", repr(handler)))
    getters = {name: _getter(handler, name, kind, state, in_batches) for name, kind in _parameters(handler)}
    known = (_message, _delivery, _context)
    if sum(getter not in known and name != "state" for name, getter in getters.items()) > 1:
        raise ConfigError(f"{_name(handler)} has several parameters for the payload: a message has one")
    many = {name: _for_each(getter) if name != "state" else getter for name, getter in getters.items()}
    return _called(handler, many if in_batches else getters, threads)


def _called(handler: Callable[..., Any], getters: dict[str, Callable[[Any], Any]], threads: int) -> Call:
    if not is_async(handler):
        pool = Threads(min(threads, MAX_THREADS))

        async def in_thread(message: Any) -> Any:
            call = partial(contextvars.copy_context().run, handler, **_arguments(getters, message))
            answer = await pool.run(call)
            return await answer if inspect.isawaitable(answer) else answer

        return in_thread

    async def in_loop(message: Any) -> Any:
        return await handler(**_arguments(getters, message))

    return in_loop


def _arguments(getters: dict[str, Callable[[Any], Any]], message: Any) -> dict[str, Any]:
    try:
        return {name: getter(message) for name, getter in getters.items()}
    except payloads.BadPayload as exc:  # a retry cannot change it
        raise Reject(str(exc)) from exc


def _parameters(handler: Callable[..., Any]) -> list[tuple[str, Any]]:
    try:
        hints = typing.get_type_hints(handler if inspect.isroutine(handler) else type(handler).__call__)
    except NameError as exc:
        raise ConfigError(f"{_name(handler)} has an annotation that cannot be found: {exc}") from exc
    found = []
    for name, parameter in inspect.signature(handler).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{_name(handler)} cannot be a handler: {parameter} is not passed by a name of its own")
        if parameter.default is parameter.empty or name in hints:
            found.append((name, hints.get(name)))
    return found


def _getter(handler: Callable[..., Any], name: str, kind: Any, state: SimpleNamespace, in_batches: bool) -> Getter:
    if in_batches and name != "state" and kind is not None:
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is not list or not inner:
            raise ConfigError(f"{_name(handler)} handles batches: {name!r} must be a list, such as list[Message]")
        kind = inner[0]
    if kind is Message or (kind in (None, Any) and name in ("message", *(("messages",) if in_batches else ()))):
        return _message
    if kind is messages.Message:
        return _delivery
    if kind is MessageContext or (kind in (None, Any) and name == "context"):
        return _context
    if name == "state":
        return lambda _: state
    if kind is None:
        raise ConfigError(f"{_name(handler)}: nothing is known to give for {name!r}; annotate it with its type")
    parse = payloads.parser(kind)
    if parse is None:
        raise ConfigError(
            f"{_name(handler)}: a message cannot become {name!r}: {kind!r}; a payload is bytes, str, dict, a pydantic "
            "model, a msgspec struct or a dataclass"
        )
    return lambda message: parse(message.data)


def _message(message: Message) -> Message:
    return message


def _delivery(message: Message) -> messages.Message:
    return message.delivery


def _context(message: Message) -> MessageContext:
    return message.context


def _for_each(getter: Getter) -> Callable[[list[Message]], list[Any]]:
    return lambda batch: [getter(message) for message in batch]


def _name(handler: Callable[..., Any]) -> str:
    return f"handler {getattr(handler, '__qualname__', repr(handler))!r}"
