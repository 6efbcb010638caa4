"""Write a platform as an AsyncAPI 3.0 document. Pure; reading one is the business of `contract.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from penstock.subjects import any_overlap
from penstock.topology.contract import EXTENSION
from penstock.topology.model import ConsumerSpec, Environment, PipelineSpec, Platform
from penstock.units import format_duration

VERSION = "3.0.0"
Json = dict[str, Any]


def document(platform: Platform, title: str | None = None, version: str = "1.0.0") -> Json:
    """The platform as an AsyncAPI document: a channel a subject, an operation a consumer or end of a pipeline."""
    channels = _Channels(platform)
    operations: Json = {}
    for consumer in platform.consumers.values():
        operations[consumer.name] = _receive(consumer, channels)
    for flow in platform.pipelines.values():
        operations |= _flow(flow, channels)
    return {
        "asyncapi": VERSION,
        "info": {"title": title or platform.path.resolve().parent.name or "platform", "version": version},
        "servers": _servers(platform.environment),
        "channels": channels.made,
        "operations": operations,
    }


class _Channels:
    """The channels made so far; one a stream and subject."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.made: Json = {}
        self.names: dict[tuple[str, str], str] = {}

    def reference(self, stream: str, subject: str) -> Json:
        if (stream, subject) not in self.names:
            name = self._name(subject)
            spec = self.platform.streams[stream]
            about = f"Stored in stream {stream}."
            self.made[name] = {
                "address": subject,
                "description": f"{spec.config['description']}. {about}" if "description" in spec.config else about,
                "x-nats-stream": stream,
            }
            self.names[stream, subject] = name
        return {"$ref": f"#/channels/{self.names[stream, subject]}"}

    def _name(self, subject: str) -> str:
        words = {"*": "any", ">": "all"}
        name = "_".join(re.sub(r"\W+", "_", words.get(token, token)) for token in subject.split("."))
        taken, unique = 1, name
        while unique in self.made:
            taken += 1
            unique = f"{name}_{taken}"
        return unique


def _receive(consumer: ConsumerSpec, channels: _Channels) -> Json:
    """The operation of a consumer: on the channel of its first filter, with all of them in the extension."""
    subjects = consumer.filters or channels.platform.streams[consumer.stream].subjects or (">",)
    references = [channels.reference(consumer.stream, subject) for subject in subjects]
    operation: Json = {"action": "receive", "channel": references[0]}
    if consumer.purpose or consumer.config.get("description"):
        operation["description"] = consumer.purpose or consumer.config["description"]
    if consumer.service:
        operation["tags"] = [{"name": consumer.service}]
    operation[EXTENSION] = _extension(consumer)
    return operation


def _extension(consumer: ConsumerSpec) -> Json:
    says: Json = {"stream": consumer.stream, "consumer": consumer.name}
    if len(consumer.filters) > 1:
        says["filter_subjects"] = list(consumer.filters)
    if consumer.ack_wait is not None:
        says["ack_wait"] = format_duration(consumer.ack_wait)
    if consumer.max_deliver is not None:
        says["max_deliver"] = consumer.max_deliver
    if consumer.dlq:
        says["dlq_subject"] = consumer.dlq
    return says


def _flow(flow: PipelineSpec, channels: _Channels) -> Json:
    """An operation for every subject that a pipeline reads, and for every stream that it writes."""
    operations: Json = {}
    for stream, subject in _reads(flow, channels.platform):
        operations[f"pipeline.{flow.name}.reads.{len(operations) + 1}"] = {
            "action": "receive",
            "channel": channels.reference(stream, subject),
        }
    sinks = [(sink.stream, sink.subject) for sink in flow.sinks if sink.stream and sink.subject]
    for number, (stream, subject) in enumerate(sinks, 1):
        target = channels.reference(stream, subject)
        operations[f"pipeline.{flow.name}.writes.{number}"] = {"action": "send", "channel": target}
    return operations


def _reads(flow: PipelineSpec, platform: Platform) -> Iterator[tuple[str, str]]:
    for name in platform.streams_read_by(flow):
        captured = platform.streams[name].subjects or (">",)
        for subject in flow.source.subjects or captured:
            if any_overlap([subject], captured):
                yield name, subject


def _servers(environment: Environment) -> Json:
    """The environment's servers. A login in a URL stays out of the document."""
    servers: Json = {}
    for number, url in enumerate(environment.servers):
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        name = environment.name if len(environment.servers) == 1 else f"{environment.name}-{number}"
        host = parts.netloc.rpartition("@")[2]
        servers[re.sub(r"[^A-Za-z0-9_-]", "-", name)] = {"host": host, "protocol": parts.scheme}
    return servers
