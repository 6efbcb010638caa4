"""Read a platform file for one environment.

`load` reports everything that is wrong in the file at once, each with line and column. What is written correctly but
unwise is the business of `lint`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.subjects import any_overlap, api_prefix
from penstock.topology import gateway, groups, pipelines
from penstock.topology.contract import Contracts
from penstock.topology.document import FilePlace, Node, Problems, expanded, nearest, overlaid, read
from penstock.topology.fields import (
    CONSUMER_FIELDS,
    ENVIRONMENT_FIELDS,
    LOGIN_PATHS,
    SERVICE_FIELDS,
    STREAM_FIELDS,
)
from penstock.topology.kinds import Duration, Field, Name, TextKind, name_problem, read_record
from penstock.topology.model import (
    DEFAULT_NAME,
    EVERY_STREAM,
    ConsumerSpec,
    Environment,
    Json,
    PackingSpec,
    Platform,
    ServiceSpec,
    SourceConsumer,
    SourceSpec,
    StreamSpec,
)
from penstock.units import from_nanoseconds, parse_duration

HISTORY = Duration(least="1m")
SECTIONS = (
    "name", "environments", "streams", "consumers", "groups", "pipelines", "services", "gateway", "asyncapi", "history",
)  # fmt: skip
PARTS = ("streams", "consumers", "groups", "pipelines")
"""The sections that an environment can lay something over."""
DEFAULT_ENVIRONMENT = "dev"


def load(path: str | Path, env: str | None = None, variables: Mapping[str, str] | None = None) -> Platform:
    """The platform that `path` declares for environment `env`.

    Without `env`, the only environment is taken, or the one named `dev`. `${NAME}` is looked up in the environment's
    `variables`, then in `variables` (the process environment when left out). Raises `ConfigError`: `FileProblems` with
    every mistake of the file and its line and column, or a plain one when there is no such file or environment.
    """
    with _collecting_later():
        return _load(Path(path), env, variables)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Without the collector: a tree of nodes is no garbage, and looking for it takes half the time of a large file."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _load(path: Path, env: str | None, variables: Mapping[str, str] | None) -> Platform:
    problems = Problems(path)
    root = read(path, problems)
    _check_sections(root, problems)
    chosen = _choose(root, env, problems)
    outside = os.environ if variables is None else variables
    known = {**outside, **_variables(root, chosen)}
    environment, parts = _for_environment(root, chosen, known, path, problems)
    streams = {name: _stream(name, node, place, environment, problems) for name, node, place in parts["streams"]}
    consumers = {name: _consumer(name, node, place, problems) for name, node, place in parts["consumers"]}
    shared = {name: groups.group(name, node, place, problems) for name, node, place in parts["groups"]}
    flows = {name: pipelines.pipeline(name, node, place, problems) for name, node, place in parts["pipelines"]}
    _check_references(parts, streams, problems)
    writers = _services(root.get("services"), streams, known, problems)
    gate = root.get("gateway")
    entry = expanded(gate, known, problems) if gate is not None else None
    served = gateway.gateway(entry, gateway.DeclaredNames(streams, consumers), problems)
    if not (streams or consumers or shared or flows or problems.found):
        problems.add(root, f"this file declares nothing: add {', '.join(PARTS[:-1])} or {PARTS[-1]}")
    problems.raise_any()
    document, title, history = root.get("asyncapi"), root.get("name"), root.get("history")
    contracts = Contracts(path, document, problems)
    described = {name: contracts.filled(spec) for name, spec in consumers.items() if spec}
    problems.raise_any()
    return Platform(
        path=path,
        environment=environment,
        streams={name: spec for name, spec in streams.items() if spec},
        consumers=described,
        pipelines={name: spec for name, spec in flows.items() if spec},
        asyncapi=document.text if document else None,
        name=title.text if title else DEFAULT_NAME,
        gateway=served,
        services=writers,
        groups={name: spec for name, spec in shared.items() if spec},
        history=parse_duration(history.text) if history else None,
    )


def _check_sections(root: Node, problems: Problems) -> None:
    if not root.is_map:
        problems.add(root, f"expected the sections {', '.join(SECTIONS)}, found {root.describe()}")
        problems.raise_any()
    for key, child in root.value.items():
        if key not in SECTIONS:
            problems.unknown_key(root.keys.get(key, child.place), "the platform file", key, SECTIONS, {})
    for key, kind in (("asyncapi", TextKind("a path")), ("name", Name("platform name")), ("history", HISTORY)):
        if (node := root.get(key)) is not None:
            kind.read(node, problems)
    if (title := root.get("name")) is not None and title.text == DEFAULT_NAME:
        problems.add(title, f"{DEFAULT_NAME!r} is what every platform without a name is called: choose another")


# -- environments ----------------------------------------------------------------------------------------------------


def _environments(root: Node) -> dict[str, Node]:
    """The environments by name; one with nothing in it has all defaults."""
    section = root.get("environments")
    if section is None or not section.is_map:
        return {}
    return {name: node if node.value is not None else Node({}, node.place) for name, node in section.value.items()}


def _choose(root: Node, env: str | None, problems: Problems) -> str | None:
    """The name of the environment to use; None when the file has none and none was asked for."""
    names = list(_environments(root))
    if env is None:
        if len(names) < 2:
            return names[0] if names else None
        env = DEFAULT_ENVIRONMENT
        if env not in names:
            where = root.get("environments") or root
            problems.add(where, f"several environments and none is named dev: choose with --env {' or '.join(names)}")
            problems.raise_any()
    elif env not in names:
        problems.add(root.get("environments") or root, f"there is no environment {env!r}; {nearest(env, names)}")
        problems.raise_any()
    return env


def _variables(root: Node, env: str | None) -> dict[str, str]:
    """The environment's own variables, before anything is checked: other values may use them."""
    node = _environments(root).get(env or "")
    variables = node.get("variables") if node else None
    return {k: v.text for k, v in variables.value.items()} if variables is not None and variables.is_map else {}


Part = tuple[str, Node, FilePlace]
"""A named thing of a section: its name, its node, where the name is written."""


def _for_environment(
    root: Node, env: str | None, variables: Mapping[str, str], path: Path, problems: Problems
) -> tuple[Environment, dict[str, list[Part]]]:
    """The chosen environment, and the sections with its changes laid over them and all variables filled in."""
    section = root.get("environments")
    if section is not None and not section.is_map:
        problems.add(section, f"expected environments by name, found {section.describe()}")
    for name, node in _environments(root).items():
        if name != env:
            read_record(_without_variables(node), f"environment {name!r}", ENVIRONMENT_FIELDS, problems)
    chosen = _environments(root).get(env or "")
    overlay = expanded(chosen, variables, problems) if chosen is not None else Node({}, root.place)
    environment = _environment(env, overlay, path, problems)
    parts = {
        part: _parts(part, expanded(root.get(part) or Node({}, root.place), variables, problems), overlay, problems)
        for part in PARTS
    }
    return environment, parts


def _without_variables(node: Node) -> Node:
    """An environment that was not chosen: its mistakes count, but its variables may well be unset here."""
    if not node.is_map:
        return node
    return replace(node, value={key: child for key, child in node.value.items() if "${" not in child.text})


def _environment(name: str | None, node: Node, path: Path, problems: Problems) -> Environment:
    values = read_record(node, f"environment {name!r}", ENVIRONMENT_FIELDS, problems) or {}
    if "timeout" in values:
        values["timeout"] = from_nanoseconds(values["timeout"]).total_seconds()
    for key in LOGIN_PATHS:
        if key in values:
            values[key] = str(path.parent / values[key])
    values["servers"] = tuple(values.get("servers", ()))
    return Environment(name=name or "default", line=node.place.line, **values)


def _parts(part: str, section: Node, overlay: Node, problems: Problems) -> list[Part]:
    """The things of one section by name, with the environment's changes laid over them."""
    if section.value is None:
        section = Node({}, section.place)
    if not section.is_map:
        problems.add(section, f"expected {part} by name, found {section.describe()}")
        return []
    over = overlay.get(part)
    if over is not None and over.value is not None and _overlay_fits(part, section, over, problems):
        section = overlaid(section, over)
    return [(name, node, section.keys.get(name, node.place)) for name, node in section.value.items()]


def _overlay_fits(part: str, section: Node, over: Node, problems: Problems) -> bool:
    """Whether an environment changes things by name; a change of what is not declared is a problem."""
    if not over.is_map:
        problems.add(over, f"expected {part} by name, found {over.describe()}")
        return False
    for name in over.value:
        if name not in section.value:
            hint = nearest(name, list(section.value))
            problems.add(
                over.keys[name], f"{name!r} is not declared under {part}, so there is nothing to change; {hint}"
            )
    return True


# -- streams ---------------------------------------------------------------------------------------------------------


def _stream(name: str, node: Node, place: FilePlace, environment: Environment, problems: Problems) -> StreamSpec | None:
    if wrong := name_problem(name):
        problems.add(place, f"{name!r} cannot be a stream name: {wrong}")
    values = _record(node, f"stream {name!r}", STREAM_FIELDS, problems)
    if values is None:
        return None
    if "mirror" in values and ("subjects" in values or "sources" in values):
        problems.add(node, f"stream {name!r} is a mirror: it takes no subjects and no sources")
    sources = _origins(node.get("sources"), values.pop("sources", []), problems)
    mirrors = _origins(node.get("mirror"), [values.pop("mirror")] if "mirror" in values else [], problems)
    own = _own(values, STREAM_FIELDS)
    if "packing" in own:
        own["packing"] = PackingSpec(**own["packing"])
    config: Json = {"name": name, "num_replicas": environment.replicas, **values}
    if sources:
        config["sources"] = [source.config for source in sources]
    if mirrors:
        config["mirror"] = mirrors[0].config
    return StreamSpec(
        name=name,
        config=config,
        line=place.line,
        sources=tuple(sources),
        mirror=mirrors[0] if mirrors else None,
        lines=_lines(node),
        **own,
    )


def _origins(node: Node | None, raw: list[Json], problems: Problems) -> list[SourceSpec]:
    """The sources, or the one mirror, that were read at `node`."""
    nodes = [] if node is None else node.value if isinstance(node.value, list) else [node]
    # a source that could not be read is missing from `raw`; then its problem is reported and the pairing is moot
    return [_origin(where, dict(one), problems) for where, one in zip(nodes, raw, strict=False)]


def _origin(node: Node, config: Json, problems: Problems) -> SourceSpec:
    domain = config.pop("domain", None)
    if domain and "external" in config:
        problems.add(node, "a source has a domain or an external, not both: the domain is short for it")
    if domain:
        config["external"] = {"api": api_prefix(domain), "deliver": ""}
    elif "external" in config:
        config["external"].setdefault("deliver", "")
    consumer = _source_consumer(node, config.pop("consumer", None), problems)
    if consumer and not consumer.server_managed:
        config["consumer"] = {"name": consumer.name, "deliver_subject": consumer.deliver_subject}
    return SourceSpec(config.get("name", ""), config, consumer, domain, node.place.line)


def _source_consumer(node: Node, raw: Json | None, problems: Problems) -> SourceConsumer | None:
    if raw is None:
        return None
    consumer = SourceConsumer(raw.get("name", ""), raw.get("server_managed", False), raw.get("deliver_subject"))
    where = node.get("consumer") or node
    if not consumer.server_managed and where.get("deliver_subject") is None:
        problems.add(where, "a source's own consumer needs a deliver_subject; or write `server_managed: true`")
    return consumer


# -- consumers -------------------------------------------------------------------------------------------------------


def _consumer(name: str, node: Node, place: FilePlace, problems: Problems) -> ConsumerSpec | None:
    if wrong := name_problem(name):
        problems.add(place, f"{name!r} cannot be a consumer name: {wrong}")
    values = _record(node, f"consumer {name!r}", CONSUMER_FIELDS, problems)
    if values is None:
        return None
    if "filter_subject" in values and "filter_subjects" in values:
        problems.add(node.keys["filters"], f"consumer {name!r} has both filter and filters: keep one")
    own = _own(values, CONSUMER_FIELDS)
    config: Json = {"durable_name": name, "name": name, "deliver_policy": "all", "ack_policy": "explicit", **values}
    own.setdefault("stream", "")
    return ConsumerSpec(name=name, config=config, line=place.line, lines=_lines(node), **own)


def _check_references(
    parts: Mapping[str, list[Part]], streams: Mapping[str, StreamSpec | None], problems: Problems
) -> None:
    """A consumer, a group or a pipeline on a stream that nobody declares."""
    for kind in ("consumer", "group"):
        for name, node, _ in parts[f"{kind}s"]:
            _check_stream(f"{kind} {name!r} reads", node.get("stream"), streams, problems)
    for name, node, _ in parts["pipelines"]:
        source, sinks = node.get("from"), node.get("to")
        for key in ("stream", "streams"):
            for stream in _items(source.get(key) if source else None):
                _check_stream(f"pipeline {name!r} reads", stream, {**streams, EVERY_STREAM: None}, problems)
        for sink in _items(sinks):
            _check_stream(f"pipeline {name!r} writes to", sink.get("stream"), streams, problems)


def _services(
    section: Node | None, streams: Mapping[str, StreamSpec | None], variables: Mapping[str, str], problems: Problems
) -> dict[str, ServiceSpec]:
    """What services write. Each subject must be one that a declared stream takes."""
    if section is None or section.value is None:
        return {}
    if not section.is_map:
        problems.add(section, f"expected services by name, found {section.describe()}")
        return {}
    taken = [subject for stream in streams.values() if stream for subject in stream.subjects]
    found = {}
    for name, written in section.value.items():
        node = expanded(written, variables, problems)
        values = read_record(node, f"service {name!r}", SERVICE_FIELDS, problems) or {}
        subjects = {key: tuple(values.get(key, ())) for key in ("publishes", "appends")}
        for key, some in subjects.items():
            for one in some:
                if None not in streams.values() and not any_overlap([one], taken):
                    problems.add(node.get(key) or node, f"service {name!r} writes to {one!r}, which no stream takes")
        found[name] = ServiceSpec(name, **subjects, owner=values.get("owner"), line=node.place.line)
    return found


def _items(node: Node | None) -> list[Node]:
    """The items of a list; a single value counts as a list of one."""
    return [] if node is None else node.value if isinstance(node.value, list) else [node]


def _check_stream(who: str, node: Node | None, names: Mapping[str, object], problems: Problems) -> None:
    if node is not None and isinstance(node.value, str) and node.value not in names:
        hint = nearest(node.value, list(names))
        problems.add(node, f"{who} stream {node.value!r}, which is not declared under streams; {hint}")


# -- shared ----------------------------------------------------------------------------------------------------------


def _record(node: Node, what: str, fields: tuple[Field, ...], problems: Problems) -> Json | None:
    empty = Node({}, node.place) if node.value is None else node  # `NAME:` with nothing after it has all defaults
    return read_record(empty, what, fields, problems)


def _own(values: Json, fields: tuple[Field, ...]) -> dict[str, Any]:
    """Take what is Penstock's own out of the values; what is left is for the server."""
    return {field.key: values.pop(field.name) for field in fields if not field.sent and field.name in values}


def _lines(node: Node) -> dict[str, int]:
    return {key: place.line for key, place in node.keys.items()}
