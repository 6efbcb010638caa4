"""The error tree: every error survives pickling, and server error numbers find their class."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import pytest

import penstock
from penstock import errors
from penstock.jetstream.codes import refusal

SAMPLES: dict[str, object] = {"int": 3, "float": 1.5, "str": "text", "tuple[str, ...]": ("a", "b")}


def all_errors() -> list[type[errors.PenstockError]]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.startswith(("penstock.spark", "penstock.cli")):
            importlib.import_module(module.name)
    found, todo = [], [errors.PenstockError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return found


def sample(kind: type[errors.PenstockError]) -> errors.PenstockError:
    if kind.__init__ is Exception.__init__:
        return kind("what happened")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return kind(*(SAMPLES.get(str(p.annotation), () if "[" in str(p.annotation) else "text") for p in given))


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_all_it_carries(kind: type[errors.PenstockError]) -> None:
    error = sample(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.args, back.__dict__) == (error.args, error.__dict__)


@pytest.mark.parametrize(
    ("code", "err_code", "kind"),
    [
        (404, 10059, errors.StreamNotFound),
        (404, 10014, errors.ConsumerNotFound),
        (400, 10149, errors.ConsumerNotFound),
        (404, 10037, errors.MessageNotFound),
        (400, 10043, errors.MessageNotFound),
        (404, 99999, errors.NotFound),
        (400, 10058, errors.AlreadyExists),
        (400, 10013, errors.AlreadyExists),
        (400, 10148, errors.AlreadyExists),
        (500, 10012, errors.InvalidConfiguration),
        (500, 10052, errors.InvalidConfiguration),
        (500, 10074, errors.InvalidConfiguration),
        (503, 10036, errors.InvalidConfiguration),
        (400, 10065, errors.InvalidConfiguration),
        (400, 99999, errors.InvalidConfiguration),
        (503, 10004, errors.ServerBusy),
        (503, 10008, errors.ServerBusy),
        (500, 10009, errors.ServerBusy),
        (409, 10158, errors.ServerBusy),
        (429, 10210, errors.ServerBusy),
        (503, 99999, errors.ServerBusy),
        (503, 10039, errors.JetStreamDisabled),
        (503, 10076, errors.JetStreamDisabled),
        (500, 10110, errors.ApiError),
        (418, 99999, errors.ApiError),
    ],
)
def test_a_server_error_number_becomes_its_class(code: int, err_code: int, kind: type[errors.PenstockError]) -> None:
    error = refusal("do it", {"code": code, "err_code": err_code, "description": "the server's words"})
    assert type(error) is kind
    assert "the server's words" in str(error)
    assert "do it" in str(error)


def test_an_error_without_numbers_is_still_an_error() -> None:
    assert type(refusal("do it", {})) is errors.ApiError
