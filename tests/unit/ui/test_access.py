"""Who may look and act."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.ui.access import LOCAL, Access, Person, is_loopback, tokens_in
from penstock.ui.server import Listen, check

DIGEST = hashlib.sha256(b"secret").hexdigest()
CERTIFICATE = {"subject": ((("organizationName", "us"),), (("commonName", "ann"),))}


def test_without_a_login_it_is_the_person_at_this_machine_who_acts_only_when_told() -> None:
    assert Access().person({}, {}, None) == Person(LOCAL, False)
    assert Access(actions=True).person({}, {}, None) == Person(LOCAL, True)


def test_a_token_is_a_login_with_a_role() -> None:
    access = Access(actions=True, tokens={DIGEST: ("ann", "operator")})
    assert access.person({"authorization": "Bearer secret"}, {}, None) == Person("ann", True)
    assert access.person({}, {"penstock": "secret"}, None) == Person("ann", True)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
        assert access.person(headers, {}, None) is None
    viewer = Access(actions=True, tokens={DIGEST: ("bob", "viewer")})
    assert viewer.bearer("secret") == Person("bob", False)
    assert Access(tokens={DIGEST: ("ann", "operator")}).bearer("secret") == Person("ann", False)


def test_names_of_certificates_and_of_a_proxy_count_only_where_they_are_asked_for() -> None:
    named = {"x-user": "ann"}
    asked = Access(actions=True, user_header="x-user", operators=frozenset({"ann"}))
    assert asked.person(named, {}, None) == Person("ann", True)
    assert asked.person({"x-user": "bob"}, {}, None) == Person("bob", False)
    assert asked.person({}, {}, CERTIFICATE) is None
    by_certificate = Access(certificates=True)
    assert by_certificate.person(named, {}, None) is None
    assert by_certificate.person({}, {}, CERTIFICATE) == Person("ann", False)


def test_a_form_belongs_to_one_person_of_one_process() -> None:
    access, ann = Access(), Person("ann", True)
    token = access.form_token(ann)
    assert access.is_own_form(ann, token)
    assert not access.is_own_form(Person("bob", True), token)
    assert not Access().is_own_form(ann, token)


@pytest.mark.parametrize(
    ("host", "taken"),
    [("127.0.0.1:8222", True), ("localhost", True), ("[::1]:8222", True), ("evil.example", False), ("", False)],
)
def test_only_our_own_names_are_answered(host: str, taken: bool) -> None:
    assert Access().takes_host(host) is taken


def test_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "people.txt"
    file.write_text(f"# people\n\nann operator {DIGEST}\n")
    assert tokens_in(file) == {DIGEST: ("ann", "operator")}
    for wrong in ("ann boss " + DIGEST, "ann operator secret", "# nobody"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"SHA256-OF-THE-TOKEN"):
            tokens_in(file)


def test_beyond_loopback_there_is_tls_and_a_login() -> None:
    assert [is_loopback(one) for one in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "host")] == [True] * 3 + [
        False
    ] * 3
    check(Listen(host="127.0.0.1"), Access())
    with pytest.raises(ConfigError, match="need TLS"):
        check(Listen(host="0.0.0.0"), Access(user_header="x-user"))
    with pytest.raises(ConfigError, match="must log in"):
        check(Listen(host="0.0.0.0", cert="c", key="k"), Access())
    check(Listen(host="0.0.0.0", cert="c", key="k"), Access(user_header="x-user"))
