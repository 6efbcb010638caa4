"""A YAML file as a tree that remembers where everything was written.

Reading collects problems instead of stopping at the first, so that one run of a command shows all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from penstock.errors import ConfigError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser where it was compiled: ten times as fast
_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")


MAX_DEPTH = 100
"""Lists and mappings inside each other; deeper ones would overrun the stack of whoever walks them."""
MAX_ALIASED = 500_000
"""Nodes that aliases may stand for altogether; nested aliases multiply."""


class FilePlace(NamedTuple):
    """Where something is written, counted from 1."""

    line: int
    column: int

    @classmethod
    def of(cls, mark: Any) -> FilePlace:
        return cls(mark.line + 1, mark.column + 1)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it is written: a scalar, a list of nodes, or a mapping of nodes."""

    value: Any
    place: FilePlace
    text: str = ""
    """A scalar as it is written; empty for lists and mappings."""
    plain: bool = False
    """Whether a scalar is written without quotes, so that its text decides its type."""
    keys: Mapping[str, FilePlace] = field(default_factory=dict)
    """Where each key of a mapping is written."""

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    def get(self, key: str) -> Node | None:
        """The node under `key`; None when it is absent, or when this is not a mapping."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if isinstance(found, Node) else None

    def describe(self) -> str:
        """What was written, for an error message."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        return "nothing" if self.value is None else repr(self.text)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong in a file."""

    line: int
    column: int
    message: str


class FileProblems(ConfigError):
    """A file is wrong in one or several places; the text has one line `file:line:column: what` for each."""

    def __init__(self, path: str, problems: tuple[Problem, ...]) -> None:
        super().__init__(path, problems)
        self.path = path
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"{self.path}:{p.line}:{p.column}: {p.message}" for p in self.problems)


class Problems:
    """Collects what is wrong with one file while it is read."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.found: list[Problem] = []
        self._seen: set[Problem] = set()

    def add(self, where: Node | FilePlace, message: str) -> None:
        place = where.place if isinstance(where, Node) else where
        problem = Problem(place.line, place.column, message)
        if problem not in self._seen:  # an anchor used twice is one mistake
            self._seen.add(problem)
            self.found.append(problem)

    def unknown_key(
        self, place: FilePlace, what: str, key: str, known: Iterable[str], aliases: Mapping[str, str]
    ) -> None:
        """Report a key nobody knows, with the nearest one that is known."""
        self.add(place, f"unknown key {key!r} in {what}; {nearest(key, list(known), aliases)}")

    def raise_any(self) -> None:
        """Raise everything found so far, in the order of the file."""
        if self.found:
            raise FileProblems(self.path, tuple(sorted(self.found)))


def nearest(word: str, known: list[str], aliases: Mapping[str, str] | None = None) -> str:
    """A hint that names the known word nearest to `word`, or all of them."""
    other_names = aliases or {}
    if word in other_names:
        return f"did you mean {other_names[word]!r}?"
    near = difflib.get_close_matches(word, [*known, *other_names], n=1)
    if near:
        return f"did you mean {other_names.get(near[0], near[0])!r}?"
    return f"known are {', '.join(known)}" if known else "none is known here"


def read(path: str | Path, problems: Problems) -> Node:
    """The file as a tree. Raises `ConfigError` when it cannot be read or is not YAML at all."""
    return parse(_text(Path(path)), problems)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{str(path)!r} cannot be read: {exc}") from exc


def parse(text: str, problems: Problems) -> Node:
    """YAML text as a tree."""
    try:
        _check_size(text, problems)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = FilePlace.of(mark) if mark else FilePlace(1, 1)
        why = ", ".join(part for part in (exc.context, exc.problem) if part)
        raise FileProblems(problems.path, (Problem(place.line, place.column, f"not valid YAML: {why}"),)) from exc
    except yaml.YAMLError as exc:
        why = " ".join(str(exc).split())
        raise FileProblems(problems.path, (Problem(1, 1, f"not valid YAML: {why}"),)) from exc
    return _Reader(problems).node(root) if root is not None else Node({}, FilePlace(1, 1))


def _check_size(text: str, problems: Problems) -> None:
    """Refuse what is nested too deep or grows too much by aliases, before anything is built from it."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []  # anchor of each open collection, and the nodes before it
    nodes = aliased = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        elif isinstance(event, yaml.NodeEvent):
            more = sizes.get(event.anchor or "", 1) if isinstance(event, yaml.AliasEvent) else 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, nodes))
            nodes, aliased = nodes + more, aliased + more - 1
            if len(open_) > MAX_DEPTH:
                problems.add(FilePlace.of(event.start_mark), f"nested deeper than {MAX_DEPTH} levels")
            if aliased > MAX_ALIASED:
                problems.add(FilePlace.of(event.start_mark), f"the aliases stand for more than {MAX_ALIASED} values")
            if len(open_) > MAX_DEPTH or aliased > MAX_ALIASED:
                problems.raise_any()


class _Reader:
    """Turns PyYAML's nodes into ours: scalars resolved, `<<` merged, double keys and loops refused."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.open: set[int] = set()
        """Identities of the nodes that are being read."""

    def node(self, raw: yaml.Node) -> Node:
        place = FilePlace.of(raw.start_mark)
        if id(raw) in self.open:
            self.problems.add(place, "this alias contains itself")
            return Node(None, place)
        self.open.add(id(raw))
        try:
            return self._node(raw, place)
        finally:
            self.open.discard(id(raw))

    def _node(self, raw: yaml.Node, place: FilePlace) -> Node:
        if isinstance(raw, yaml.SequenceNode):
            return Node([self.node(item) for item in raw.value], place)
        if isinstance(raw, yaml.MappingNode):
            return self._mapping(raw, place)
        assert isinstance(raw, yaml.ScalarNode)
        return self._scalar(raw, place)

    def _mapping(self, raw: yaml.MappingNode, place: FilePlace) -> Node:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        keys: dict[str, FilePlace] = {}
        for key_node, value_node in raw.value:
            key, key_place = str(key_node.value), FilePlace.of(key_node.start_mark)
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged |= self._merge(value_node)
            elif not isinstance(key_node, yaml.ScalarNode):
                self.problems.add(key_place, "a key must be a word, not a list or a mapping")
            elif key in own:
                self.problems.add(
                    key_place, f"{key!r} is written twice: here and in line {keys[key].line}; keep one, or rename one"
                )
            else:
                own[key], keys[key] = self.node(value_node), key_place
        all_keys = {key: node.place for key, node in merged.items()} | keys
        return Node(merged | own, place, keys=all_keys)

    def _merge(self, raw: yaml.Node) -> dict[str, Node]:
        parts = raw.value if isinstance(raw, yaml.SequenceNode) else [raw]
        result: dict[str, Node] = {}
        for part in reversed(parts):  # earlier ones win, as YAML says
            node = self.node(part)
            if node.is_map:
                result |= node.value
            else:
                self.problems.add(node, "`<<` merges mappings only")
        return result

    def _scalar(self, raw: yaml.ScalarNode, place: FilePlace) -> Node:
        text = str(raw.value)
        return Node(_typed(raw.tag, text, place, self.problems), place, text, plain=not raw.style)


_scalars: Any = yaml.SafeLoader("")


def _typed(tag: str, text: str, place: FilePlace, problems: Problems) -> Any:
    """The value that YAML gives to a scalar of this tag."""
    if tag == "tag:yaml.org,2002:str":
        return text
    if tag == "tag:yaml.org,2002:binary":
        problems.add(place, "`!!binary` is not taken here: write text")
        return None
    try:
        return _scalars.construct_object(yaml.ScalarNode(tag, text), deep=True)
    except (yaml.YAMLError, ValueError) as exc:
        problems.add(place, f"{text!r} cannot be read: {getattr(exc, 'problem', exc)}")
    except (AttributeError, LookupError, TypeError):  # PyYAML trusts that a tag fits what it is written before
        problems.add(place, f"{text!r} cannot be read as `{tag.replace('tag:yaml.org,2002:', '!!')}`")
    return None


def expanded(node: Node, variables: Mapping[str, str], problems: Problems) -> Node:
    """The tree with every `${NAME}` replaced by the variable's value; `$${` stands for a plain `${`."""
    if isinstance(node.value, dict):
        return replace(node, value={key: expanded(child, variables, problems) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[expanded(child, variables, problems) for child in node.value])
    if "${" not in node.text:
        return node
    text = _filled(node, variables, problems)
    # `{replicas: "${COPIES}"}` must be quoted inside braces, and still means a number
    typed = text and (node.plain or _VARIABLE.fullmatch(node.text))
    tag = _scalars.resolve(yaml.ScalarNode, text, (True, False)) if typed else "tag:yaml.org,2002:str"
    return replace(node, value=_typed(tag, text, node.place, problems), text=text)


def _filled(node: Node, variables: Mapping[str, str], problems: Problems) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] not in variables:
            problems.add(
                node,
                f"the variable {match[1]!r} is not set: add it to the environment's `variables`, or export it; "
                "write $${ for a plain ${",
            )
        return variables.get(match[1], match[0])

    return _VARIABLE.sub(one, node.text)


def overlaid(base: Node, over: Node) -> Node:
    """`base` with what `over` says instead: mappings merge key by key, `null` takes away, the rest is replaced."""
    if not (base.is_map and over.is_map):
        return over
    value, keys = dict(base.value), {**over.keys, **base.keys}
    for key, node in over.value.items():
        if node.value is None:
            value.pop(key, None)
        else:
            value[key] = overlaid(value[key], node) if key in value else node
            if not node.is_map:
                keys[key] = over.keys[key]  # the line that counts is the one that was taken
    return Node(value, base.place, keys=keys)
