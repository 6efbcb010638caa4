"""Read an AsyncAPI document (2.x or 3.x): what its `x-nats-config` says about the consumers of a platform.

For a consumer that names no channel, the operation of its own name counts, then the channel with its subject. What the
operation says wins over what its channel says.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from penstock.errors import ConfigError
from penstock.topology.document import FilePlace, Node, Problems, nearest, read
from penstock.topology.kinds import Count, Duration, Field, Subject, read_record
from penstock.topology.model import ConsumerSpec, Contract

EXTENSION = "x-nats-config"
FIELDS = (
    Field("ack_wait", Duration(), "Not acknowledged for this long: delivered again."),
    Field("max_deliver", Count(1, None, -1), "Deliveries before the message becomes a dead letter."),
    Field("dlq_subject", Subject(literal=True), "Where dead letters go."),
)
KNOWN = tuple(field.key for field in FIELDS)
_PARAMETER = re.compile(r"\{[^}]*\}")


@dataclass(frozen=True, slots=True)
class ContractOperation:
    """A channel or an operation, as far as it concerns a consumer."""

    name: str
    address: str
    """The subject; a parameter such as `{id}` stands for one token."""
    says: tuple[Node, ...]
    """The `x-nats-config` that apply, the decisive one last."""
    line: int = 0
    """Where the address is written; 0 when there is none, and the name stands for it."""

    @property
    def subject(self) -> str:
        return _PARAMETER.sub("*", self.address)


class Description:
    """One AsyncAPI document. Raises `ConfigError` when it cannot be read or is no AsyncAPI at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems = Problems(path)
        self.root = read(path, self.problems)
        version = self.root.get("asyncapi")
        major = version.text.split(".")[0] if version else ""
        if major not in ("2", "3"):
            self.problems.add(version or self.root, "not an AsyncAPI 2.x or 3.x document: `asyncapi: 3.0.0` is missing")
        self._check_references()
        self.problems.raise_any()
        self.channels = {one.name: one for one in (self._channels3() if major == "3" else self._channels2())}
        self.operations = {one.name: one for one in (self._operations3() if major == "3" else self._operations2())}
        self.problems.raise_any()

    def _check_references(self) -> None:
        """Every reference into this document, wherever it stands, has to lead somewhere."""
        ahead = [self.root]
        while ahead:
            node = ahead.pop()
            children = node.value.values() if node.is_map else node.value if isinstance(node.value, list) else ()
            ahead.extend(children)
            reference = node.get("$ref")
            if reference is not None and reference.text.startswith("#"):
                self._resolved(node)

    def _resolved(self, node: Node) -> Node | None:
        """The node itself, or what its `$ref` leads to; None, after saying so, when that is nothing we can read."""
        seen: set[str] = set()
        while (reference := node.get("$ref")) is not None:
            pointer, target = reference.text, None
            if pointer in seen:
                self.problems.add(reference, f"{pointer!r} leads back to itself")
                return None
            seen.add(pointer)
            if pointer.startswith("#"):
                target = _at(self.root, pointer)
            if target is None:
                why = "leads nowhere" if pointer.startswith("#") else "leads out of this document: write `#/...`"
                self.problems.add(reference, f"{pointer!r} {why}")
                return None
            node = target
        return node

    def _children(self, section: str) -> Iterator[tuple[str, Node]]:
        """The channels or operations by name, references followed; whatever is not a mapping is a problem."""
        node = self.root.get(section)
        if node is None or node.value is None:
            return
        if not node.is_map:
            self.problems.add(node, f"expected {section} by name, found {node.describe()}")
            return
        for name, child in node.value.items():
            found = self._resolved(child)
            if found is not None and found.is_map:
                yield name, found
            elif found is not None:
                self.problems.add(found, f"expected {section[:-1]} {name!r} as a mapping, found {found.describe()}")

    def _channels3(self) -> Iterator[ContractOperation]:
        for name, node in self._children("channels"):
            address = node.get("address")
            if address and address.value:
                yield ContractOperation(name, address.text, _says(node), address.place.line)
            else:
                yield ContractOperation(name, name, _says(node))

    def _operations3(self) -> Iterator[ContractOperation]:
        for name, node in self._children("operations"):
            reference = node.get("channel")
            pointer = reference.get("$ref") if reference else None
            channel = self._channel(pointer.text) if pointer else None
            if channel is None:
                self.problems.add(pointer or node, f"operation {name!r} has no channel of this document")
                continue
            yield ContractOperation(name, channel.address, (*channel.says, *_says(node)), channel.line)

    def _channel(self, pointer: str) -> ContractOperation | None:
        """The channel of this document at the pointer."""
        return self.channels.get(_last(pointer)) if pointer.startswith("#/channels/") else None

    def _channels2(self) -> Iterator[ContractOperation]:
        for name, node in self._children("channels"):
            inner = [says for verb in ("publish", "subscribe") if (op := node.get(verb)) for says in _says(op)]
            # two operations that both speak are told apart by their operationId only
            yield ContractOperation(name, name, (*_says(node), *(inner if len(inner) == 1 else ())), node.place.line)

    def _operations2(self) -> Iterator[ContractOperation]:
        for name, node in self._children("channels"):
            for verb in ("publish", "subscribe"):
                operation = node.get(verb)
                identity = operation.get("operationId") if operation else None
                if operation and identity:
                    yield ContractOperation(identity.text, name, (*_says(node), *_says(operation)), node.place.line)

    def find(self, consumer: ConsumerSpec) -> ContractOperation | None:
        """What describes this consumer without being named by it."""
        if consumer.name in self.operations:
            return self.operations[consumer.name]
        if len(consumer.filters) != 1:
            return None
        return next((one for one in self.channels.values() if one.subject == consumer.filters[0]), None)

    def at(self, pointer: str) -> ContractOperation:
        """What a pointer such as `/channels/usage` means; a `ConfigError` says what there is instead."""
        parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.strip("/").split("/", 1)]
        sections: dict[str, dict[str, ContractOperation]] = {"channels": self.channels, "operations": self.operations}
        if len(parts) != 2 or parts[0] not in sections:
            raise ConfigError(f"#{pointer} is neither #/channels/NAME nor #/operations/NAME")
        section = sections[parts[0]]
        if parts[1] not in section:
            raise ConfigError(f"{self.path} has no {parts[0][:-1]} {parts[1]!r}; {nearest(parts[1], list(section))}")
        return section[parts[1]]

    def contract(self, described: ContractOperation) -> Contract:
        """The values of all `x-nats-config` that apply."""
        values: dict[str, Any] = {}
        for node in described.says:
            values |= _read(node, self.problems)
        line = described.says[-1].place.line if described.says else self.root.place.line
        subject = described.subject if described.line else None
        return Contract(where=f"{self.path.name}:{line}", subject=subject, **values)


def _at(root: Node, pointer: str) -> Node | None:
    """What a pointer such as `#/components/channels/a` leads to."""
    node: Node | None = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        token = unquote(part).replace("~1", "/").replace("~0", "~")
        if node is not None and isinstance(node.value, list):
            place = int(token) if token.isdecimal() and len(token) < 10 else len(node.value)
            node = node.value[place] if place < len(node.value) else None
        else:
            node = node.get(token) if node is not None else None
    return node


def _says(node: Node) -> tuple[Node, ...]:
    extension = node.get(EXTENSION)
    return () if extension is None else (extension,)


def _last(pointer: str) -> str:
    return unquote(pointer.rsplit("/", 1)[-1]).replace("~1", "/").replace("~0", "~")


def _read(node: Node, problems: Problems) -> dict[str, Any]:
    """The fields that concern us. Others are somebody else's, unless they look like a slip of ours."""
    if not node.is_map:
        problems.add(node, f"expected {', '.join(KNOWN)}, found {node.describe()}")
        return {}
    ours = {key: child for key, child in node.value.items() if key in KNOWN or _slip(key)}
    return read_record(replace(node, value=ours), EXTENSION, FIELDS, problems) or {}


def _slip(key: str) -> bool:
    """Whether a key nobody knows was most likely meant to be one of ours."""
    return bool(difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.8))


class Contracts:
    """The AsyncAPI documents of one platform file; each is read once."""

    def __init__(self, path: Path, whole: Node | None, problems: Problems) -> None:
        self.path = path
        self.problems = problems
        self.documents: dict[str, Description | None] = {}
        self.whole = self._document(whole.text, whole.place) if whole is not None else None

    def filled(self, consumer: ConsumerSpec) -> ConsumerSpec:
        """The consumer with what its document says: kept beside it, and filled in where the file says nothing."""
        contract = self._contract(consumer)
        if contract is None:
            return consumer
        config = dict(consumer.config)
        acks_by_time = consumer.ack_policy in ("explicit", "all")
        if contract.ack_wait is not None and acks_by_time and "backoff" not in config:
            config.setdefault("ack_wait", contract.ack_wait)
        if contract.max_deliver is not None and acks_by_time:
            config.setdefault("max_deliver", contract.max_deliver)
        return replace(consumer, config=config, dlq=consumer.dlq or contract.dlq_subject, contract=contract)

    def _contract(self, consumer: ConsumerSpec) -> Contract | None:
        document, described = self.whole, None
        if consumer.asyncapi:
            document, described = self._named(consumer)
        elif document:
            described = document.find(consumer)
        if document is None or described is None:
            return None
        contract = document.contract(described)
        document.problems.raise_any()
        return contract

    def _named(self, consumer: ConsumerSpec) -> tuple[Description | None, ContractOperation | None]:
        file, _, pointer = str(consumer.asyncapi).partition("#")
        place = FilePlace(consumer.line_of("asyncapi"), 1)
        document = self._document(file, place) if file else self.whole
        if document is None:
            if not file:
                self.problems.add(place, f"{consumer.asyncapi!r} names no file, and the platform has no `asyncapi:`")
            return None, None
        try:
            return document, document.at(pointer)
        except ConfigError as exc:
            self.problems.add(place, str(exc))
            return document, None

    def _document(self, file: str, place: FilePlace) -> Description | None:
        if file not in self.documents:
            path = self.path.parent / file
            self.documents[file] = Description(path) if path.is_file() else None
        if self.documents[file] is None:
            self.problems.add(place, f"there is no AsyncAPI document {str(self.path.parent / file)!r}")
        return self.documents[file]
