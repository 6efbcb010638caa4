"""What is wanted and what is there: the two sides a plan compares. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from penstock.broker.model import ConsumerInfo, Json, StreamInfo
from penstock.topology import ownership
from penstock.topology.model import Platform

STREAM = "stream"
CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class Resource:
    """A stream, or a consumer of a stream."""

    stream: str
    consumer: str | None = None

    @property
    def type(self) -> str:
        return STREAM if self.consumer is None else CONSUMER

    @property
    def name(self) -> str:
        return self.consumer or self.stream

    def __str__(self) -> str:
        return f"stream {self.stream}" if self.consumer is None else f"consumer {self.consumer} of {self.stream}"


Configs = Mapping[Resource, Json]
"""Configurations in the server's own shape."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What one platform declares."""

    platform: str
    """The name that marks what this platform owns."""
    configs: Configs
    """Only what is declared; every other field is left as the server has it."""

    @classmethod
    def of(cls, platform: Platform) -> Self:
        """What the platform file declares, in the order of the file."""
        streams: Configs = {Resource(name): spec.config for name, spec in platform.streams.items()}
        consumers = {
            Resource(spec.stream, name): ownership.described(spec) for name, spec in platform.consumers.items()
        }
        return cls(platform.name, {**streams, **consumers})


@dataclass(frozen=True, slots=True)
class Actual:
    """What the server has: every stream that matters, and the consumers of those."""

    streams: Mapping[str, StreamInfo] = field(default_factory=dict)
    consumers: Mapping[Resource, ConsumerInfo] = field(default_factory=dict)
    unanswered: frozenset[Resource] = frozenset()
    """What exists, but nobody answers for it: a group without a leader."""

    def config(self, resource: Resource) -> Json | None:
        """The configuration the server shows; None when there is no such resource."""
        info = self.streams.get(resource.stream) if resource.consumer is None else self.consumers.get(resource)
        return None if info is None else info.config

    def resources(self) -> list[Resource]:
        return [*map(Resource, self.streams), *self.consumers]
