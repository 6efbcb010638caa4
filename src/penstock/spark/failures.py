"""Spark's errors in one readable message: what went wrong, without the stacks of three languages. Pure."""

from __future__ import annotations

import re

_PYTHON_LAST = re.compile(r"^(?P<path>(?:[A-Za-z_]\w*\.)*)(?P<kind>[A-Z]\w*): (?P<text>.+)$", re.MULTILINE)
_JAVA_CAUSE = re.compile(r"Caused by: (?:[\w.$]+\.)?(?P<kind>[\w$]+): (?P<text>.+)")
_CONDITION = re.compile(r"\[(?P<condition>[A-Z0-9_.]+)\] ?")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+;?")
_STACK = re.compile(r";\n|\n\s*(?:at [\w.$/]+\(|Caused by:|Driver stacktrace|JVM stacktrace|={2,3} )")
"""Where the words end and a stack of calls, or the tree of a plan, begins."""
SPEAKS_FOR_ITSELF = ("penstock.", "pyspark.")
JVM = ("java.", "org.", "py4j.", "scala.")


def readable(error: BaseException | str) -> str:
    """The innermost reason of an error of Spark: a Python exception where there is one, else Spark's own words."""
    text = str(error)
    if own := _python_reason(text):
        return own
    causes = list(_JAVA_CAUSE.finditer(text))
    first = causes[-1]["text"] if causes else _STACK.split(text, maxsplit=1)[0]
    return _tidied(first) or type(error).__name__


def _python_reason(text: str) -> str | None:
    """The last exception of a Python traceback in the text; ours speaks for itself, others with their kind."""
    if "Traceback (most recent call last)" not in text:
        return None
    raised = [
        match for match in _PYTHON_LAST.finditer(text) if not match["path"].startswith(("java.", "org.", "py4j."))
    ]
    own = [match for match in raised if match["path"].startswith(SPEAKS_FOR_ITSELF)]
    if own:
        return _tidied(own[-1]["text"])
    return f"{raised[-1]['kind']}: {_tidied(raised[-1]['text'])}" if raised else None


def _tidied(text: str) -> str:
    text = _SQLSTATE.sub("", _CONDITION.sub("", _STACK.split(text, maxsplit=1)[0]))
    return re.sub(r"\s+", " ", text).strip()
