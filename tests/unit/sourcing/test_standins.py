"""Forms of a source that the server takes for another one, and that change nothing."""

from __future__ import annotations

from penstock import subjects
from penstock.jetstream.model import Json
from penstock.sourcing import standins
from penstock.sourcing.mapping import Mapping

SUBJECTS = ["a", "a.b", "a.b.c", "a.b.c.d", "orders.eu.new", "o.x"]


def identity(source: Json) -> object:
    return source.get("filter_subject"), [(one["src"], one["dest"]) for one in source.get("subject_transforms") or ()]


def test_every_form_is_another_one_and_lets_every_subject_through_once_and_unchanged() -> None:
    for filter_ in (None, ">", "orders.*.new", "o.>", "o.x"):
        source: Json = {"name": "O"} | ({"filter_subject": filter_} if filter_ else {})
        forms = [standins.stand_in(source, 7, number) for number in range(1, 6)]
        assert len({str(identity(one or {})) for one in [source, *forms]}) == 6
        for form in forms:
            assert form is not None
            assert form["opt_start_seq"] == 7
            mappings = [Mapping(one["src"], one["dest"]) for one in form["subject_transforms"]]
            for subject in SUBJECTS:
                mapped = [new for one in mappings if (new := one.map(subject)) is not None]
                wanted = [subject] if subjects.matches(filter_ or ">", subject) else []
                assert mapped == wanted, (filter_, form)


def test_transforms_are_kept_and_those_of_everything_have_no_other_form() -> None:
    given = [{"src": "a.*", "dest": "b.{{wildcard(1)}}"}]
    form = standins.stand_in({"name": "O", "subject_transforms": given}, 1, 1)
    assert form is not None
    assert form["subject_transforms"][:1] == given
    assert standins.stand_in({"name": "O", "subject_transforms": [{"src": ">", "dest": "x.>"}]}, 1, 1) is None


def test_a_plan_sees_what_stands_for_the_declared_source_until_another_is_declared() -> None:
    declared: Json = {"name": "O", "filter_subject": "o.x"}
    first, metadata = standins.noted(declared, 5, {"other": "kept"})
    assert metadata["other"] == "kept"
    shown = {"metadata": metadata}
    assert standins.in_place({"sources": [declared]}, shown) == {"sources": [first]}
    other = {"name": "O", "filter_subject": "o.y"}
    assert standins.in_place({"sources": [other]}, shown) == {"sources": [other]}
    assert standins.in_place({"sources": [declared]}, {}) == {"sources": [declared]}
    second, _ = standins.noted(declared, 9, metadata)
    assert identity(second) != identity(first)
