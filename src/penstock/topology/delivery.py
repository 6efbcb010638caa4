"""Where the consumers of sources deliver: subjects that exist stay, subjects that two sources share are told. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from penstock.jetstream.model import Json
from penstock.topology.resource import Actual, Desired, Resource


def keeping_subjects(desired: Desired, actual: Actual) -> Desired:
    """The same platform, with the deliver subjects that its server-managed sources have already.

    Earlier versions left the domain out of them. Such a subject goes on being used, unless several sources receive on
    it: then each gets messages of the others, and all but one of them get a new subject.
    """
    taken = set(shared_subjects(actual))
    found = {
        consumer: subject
        for consumer, subject, _ in _bound(actual)
        if consumer in desired.chosen and subject not in taken
    }
    if not found:
        return desired
    configs = {resource: _rebound(resource, config, found) for resource, config in desired.configs.items()}
    return replace(desired, configs=configs)


def shared_subjects(actual: Actual) -> dict[str, list[tuple[Resource, Resource]]]:
    """Deliver subjects that more than one source receives on, with the consumers and the streams that read them."""
    users: dict[str, list[tuple[Resource, Resource]]] = defaultdict(list)
    for consumer, subject, stream in _bound(actual):
        users[subject].append((consumer, stream))
    return {subject: some for subject, some in users.items() if len(some) > 1}


def _bound(actual: Actual) -> Iterator[tuple[Resource, str, Resource]]:
    """The consumers that sources read through, where each of them delivers, and the stream that reads."""
    for info in actual.streams.values():
        for origin in _origins(info.config):
            if origin.get("consumer"):
                yield _consumer(origin), str(origin["consumer"].get("deliver_subject") or ""), Resource(info.name)


def _origins(config: Json) -> list[Json]:
    return [origin for origin in [config.get("mirror"), *(config.get("sources") or ())] if origin]


def _consumer(origin: Json) -> Resource:
    return Resource(origin["name"], origin["consumer"]["name"], (origin.get("external") or {}).get("api"))


def _rebound(resource: Resource, config: Json, found: dict[Resource, str]) -> Json:
    if resource in found:
        return {**config, "deliver_subject": found[resource]}
    if resource.consumer is not None or not _origins(config):
        return config
    made = dict(config)
    if config.get("sources"):
        made["sources"] = [_moved(origin, found) for origin in config["sources"]]
    if config.get("mirror"):
        made["mirror"] = _moved(config["mirror"], found)
    return made


def _moved(origin: Json, found: dict[Resource, str]) -> Json:
    if not origin.get("consumer") or (subject := found.get(_consumer(origin))) is None:
        return origin
    return {**origin, "consumer": {**origin["consumer"], "deliver_subject": subject}}
