"""The gateway section of a platform file: read, checked, and refused with the place that is wrong."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.gateway.grants import Grants, NotAuthenticated, NotGranted, check_subject, granted_consumer
from penstock.gateway.limits import Allowance, TooMany
from penstock.topology.load import load
from penstock.topology.model import GatewaySpec

DIGEST = hashlib.sha256(b"secret").hexdigest()
REST = """
streams:
  FACTS: {subjects: [facts.>]}
consumers:
  edge_reader: {stream: FACTS, reader: dedicated}
gateway:
"""
NOW = datetime(2026, 11, 16, tzinfo=UTC)


def read(tmp_path: Path, section: str) -> GatewaySpec:
    path = tmp_path / "penstock.yaml"
    path.write_text(REST + section)
    found = load(path).gateway
    assert found is not None
    return found


def grants(tmp_path: Path) -> Grants:
    section = f"""
  identities:
    edge: {{certificates: [edge.test, "spiffe://zone/edge"], consumers: [edge_reader], subjects: [facts.a.*]}}
    bot: {{tokens: [{{sha256: {DIGEST}, expires: 2026-12-01T00:00:00Z}}]}}
"""
    return Grants(read(tmp_path, section))


def test_limits_and_identities_are_read(tmp_path: Path) -> None:
    spec = read(tmp_path, f"""
  limits: {{page: 20, body: 1MiB, wait: 5s}}
  identities:
    edge: {{certificates: [edge.test], tokens: [{{sha256: {DIGEST}}}], consumers: [edge_reader], subjects: [facts.>]}}
""")  # fmt: skip
    assert (spec.limits.page, spec.limits.body, spec.limits.wait) == (20, 1024 * 1024, timedelta(seconds=5))
    assert spec.identities["edge"].consumers == (("FACTS", "edge_reader"),)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("  identities: {e: {certificates: [x], consumers: [edge_raeder]}}", "edge_raeder.*did you mean"),
        ("  identities: {e: {consumers: [edge_reader]}}", "neither certificates nor tokens"),
        ("  identities: {e: {tokens: [{sha256: secret}]}}", "SHA-256 in 64"),
        ("  identities: {e: {certificates: [x], subjets: [a]}}", "subjets"),
        ("  identities: {a: {certificates: [x]}, b: {certificates: [x]}}", "'a' and 'b' both have 'x'"),
        ("  identities: [a]", "identities by name"),
        ("  limits: {page: 0}", "page|from 1"),
        ("  limts: {}", "limts"),
    ],
)
def test_a_wrong_section_is_refused_with_the_reason(tmp_path: Path, section: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, section)


def certificate(*names: tuple[str, str]) -> dict[str, object]:
    return {"subject": ((("commonName", "edge.test"),),), "subjectAltName": names}


def test_a_certificate_proves_by_its_alternative_names_and_never_by_its_common_name(tmp_path: Path) -> None:
    made = grants(tmp_path)
    for name in (("DNS", "edge.test"), ("URI", "spiffe://zone/edge")):
        assert made.caller(certificate(name), None, NOW).name == "edge"
    for name in (("DNS", "other.test"), ("IP Address", "edge.test")):
        with pytest.raises(NotAuthenticated):
            made.caller(certificate(name), None, NOW)


@pytest.mark.parametrize("header", ["Bearer secret", "bearer secret", "Bearer  secret "])
def test_a_token_proves_until_it_expires(tmp_path: Path, header: str) -> None:
    made = grants(tmp_path)
    assert made.caller(None, header, NOW).name == "bot"
    with pytest.raises(NotAuthenticated, match="expired"):
        made.caller(None, header, NOW + timedelta(days=30))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer secret2", "Basic secret", "secret"])
def test_anything_else_proves_nothing(tmp_path: Path, header: str | None) -> None:
    with pytest.raises(NotAuthenticated):
        grants(tmp_path).caller(None, header, NOW)


def test_certificate_and_token_of_two_identities_prove_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotAuthenticated, match="different identities"):
        grants(tmp_path).caller(certificate(("DNS", "edge.test")), "Bearer secret", NOW)


def test_only_what_is_granted_may_be_used(tmp_path: Path) -> None:
    edge = grants(tmp_path).caller(certificate(("DNS", "edge.test")), None, NOW)
    assert granted_consumer(edge, "edge_reader", "") == granted_consumer(edge, "edge_reader", "FACTS") == "FACTS"
    check_subject(edge, "facts.a.b")
    for consumer, stream in (("other", ""), ("edge_reader", "OTHER"), ("", "")):
        with pytest.raises(NotGranted):
            granted_consumer(edge, consumer, stream)
    for subject in ("facts.a", "facts.a.b.c", "facts.b.b", "facts.a.*", "facts.a.>", "", "facts.a."):
        with pytest.raises(NotGranted):
            check_subject(edge, subject)


def test_an_allowance_fills_with_its_rate_and_counts_what_is_under_way() -> None:
    allowance = Allowance(rate=2, concurrent=3)
    for _ in range(2):
        allowance.enter(10.0)
    with pytest.raises(TooMany, match="2 calls a second"):
        allowance.enter(10.0)
    allowance.enter(10.6)
    with pytest.raises(TooMany, match="3 calls of this identity"):
        allowance.enter(20.0)
    allowance.leave()
    allowance.enter(20.0)
