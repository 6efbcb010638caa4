"""Spark's errors in one readable message: what went wrong, without the stacks of three languages. Pure."""

from __future__ import annotations

import re

_RAISED = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*"
    r"(?P<path>(?:[A-Za-z_]\w*\.)*)(?P<kind>[A-Z]\w*)(?:: (?P<text>.+))?$",
    re.MULTILINE,
)
"""The exception below a traceback. Spark's description of the query has such lines too: `Identifier: p`."""
_JAVA_CAUSE = re.compile(r"(?:^|Caused by): (?:[\w.$]+\.)?(?P<kind>[\w$]+): (?P<text>.+)", re.MULTILINE)
"""As the JVM writes it, and as py4j does for a call out of Python."""
_CONDITION = re.compile(r"\[(?P<condition>[A-Z0-9_.]+)\] ?")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+;?")
_STACK = re.compile(r";\n|\n\s*(?:at [\w.$/]+\(|Caused by:|Driver stacktrace|JVM stacktrace|={2,3} )")
"""Where the message ends and a stack trace, or the tree of a plan, begins."""
OURS = "penstock."
SPEAK_FOR_THEMSELVES = (OURS, "pyspark.")
JVM = ("java.", "org.", "py4j.", "scala.")
MISFITS = (
    "AbstractMethodError",
    "ClassNotFoundException",
    "IncompatibleClassChangeError",
    "NoClassDefFoundError",
    "NoSuchFieldError",
    "NoSuchMethodError",
)
"""What the JVM raises when jars do not go together. The text of these is only the name of what it looked for."""


def readable(error: BaseException | str) -> str:
    """Return the innermost reason of a Spark error: a Python exception if there is one, otherwise Spark's own text."""
    text = str(error)
    if own := _python_reason(text):
        return own
    causes = list(_JAVA_CAUSE.finditer(text))
    if not causes:
        return _tidied(text) or type(error).__name__
    kind, reason = causes[-1].group("kind", "text")
    told = _tidied(reason) or kind
    return f"a jar is missing, or made for another version of Spark: {kind}: {told}" if kind in MISFITS else told


def _python_reason(text: str) -> str | None:
    """The exception of the last traceback in the text, which is the innermost, but ours before any other.

    Ours and Spark's are shown by their text alone, others with their type.
    """
    raised = [match for match in _RAISED.finditer(text) if not match["path"].startswith(JVM)]
    if not raised:
        return None
    told = next((match for match in reversed(raised) if match["path"].startswith(OURS)), raised[-1])
    words = _tidied(told["text"] or "")
    return words if words and told["path"].startswith(SPEAK_FOR_THEMSELVES) else f"{told['kind']}: {words}".rstrip(": ")


def _tidied(text: str) -> str:
    text = _SQLSTATE.sub("", _CONDITION.sub("", _STACK.split(text, maxsplit=1)[0]))
    return re.sub(r"\s+", " ", text).strip()
