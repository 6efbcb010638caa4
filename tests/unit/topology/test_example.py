"""The example platform is complete, and the pages written from tables are current."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from tests.unit.topology.test_asyncapi import check

from penstock.topology import asyncapi, reference
from penstock.topology.catalog import catalog
from penstock.topology.lint import lint
from penstock.topology.load import load
from penstock.topology.lock import lock_path, read_lock

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/gpuaas/penstock.yaml"

STREAMS = {
    "BILLING": (["platform.billing.>"], "7d"),
    "PAYMENTS": (["platform.payments.>"], "30d"),
    "PROVISIONING": (["gpuaas.provisioning.>"], "7d"),
    "APPS": (["appplatform.>", "platform.artifact.>"], "7d"),
    "STORAGE": (["storage.>"], "7d"),
    "DLQ": (["dlq.>"], "30d"),
}

CONSUMERS = """
BILLING notification_relay_low_balance platform.billing.low_balance_warning notification-relay 30s 10
BILLING notification_relay_auto_release_pending platform.billing.auto_release_pending notification-relay 30s 10
BILLING notification_relay_balance_depleted platform.billing.balance_depleted notification-relay 30s 10
BILLING billing_worker_usage_metered platform.billing.usage.metered billing-worker 30s 10
PAYMENTS billing_worker_balance_credited platform.payments.balance_credited billing-worker 30s 10
PAYMENTS notification_relay_reconcile_failed platform.payments.reconcile_failed notification-relay 30s 10
PROVISIONING provisioning_worker_provision_requested gpuaas.provisioning.requested provisioning-worker 45s 20
PROVISIONING billing_worker_provision_active gpuaas.provisioning.active billing-worker 30s 10
PROVISIONING notification_relay_provision_active gpuaas.provisioning.active notification-relay 30s 10
PROVISIONING notification_relay_provision_failed gpuaas.provisioning.failed notification-relay 30s 10
PROVISIONING provisioning_worker_force_release gpuaas.provisioning.force_release_requested provisioning-worker 45s 20
PROVISIONING provisioning_worker_releasing_requested gpuaas.provisioning.releasing.requested provisioning-worker 45s 20
PROVISIONING billing_worker_releasing_completed gpuaas.provisioning.releasing.completed billing-worker 30s 10
PROVISIONING notification_relay_releasing_completed gpuaas.provisioning.releasing.completed notification-relay 30s 10
PROVISIONING billing_worker_release_failed gpuaas.provisioning.release_failed billing-worker 30s 10
PROVISIONING notification_relay_release_failed gpuaas.provisioning.release_failed notification-relay 30s 10
APPS app_runtime_worker_instance_requested appplatform.runtime.instance.requested app-runtime-worker 45s 20
APPS app_runtime_worker_instance_upgrade_requested appplatform.runtime.instance.upgrade_requested app-runtime-worker 45s 20
APPS app_runtime_worker_instance_rollback_requested appplatform.runtime.instance.rollback_requested app-runtime-worker 45s 20
APPS app_runtime_worker_instance_decommission_requested appplatform.runtime.instance.decommission_requested app-runtime-worker 45s 20
STORAGE storage_worker_attachment_requested storage.attachment.requested provisioning-worker_/_storage-worker 45s 20
STORAGE storage_worker_attachment_detach_requested storage.attachment.detach_requested provisioning-worker_/_storage-worker 45s 20
DLQ dlq_inspector dlq.> ops_/_replay_tooling 1m 1
"""  # noqa: E501


@pytest.mark.parametrize(("env", "replicas"), [("dev", 1), ("prod", 3)])
def test_the_example_has_every_stream_as_specified(env: str, replicas: int) -> None:
    rows = {row.stream: row for row in catalog(load(EXAMPLE, env)).streams}
    assert {name: (list(row.subjects), row.max_age) for name, row in rows.items()} == STREAMS
    for row in rows.values():
        assert (row.retention, row.storage, row.max_bytes, row.discard) == ("limits", "file", "64MB", "old")
        assert row.replicas == replicas


def test_the_example_has_every_consumer_as_specified() -> None:
    platform = load(EXAMPLE)
    rows = [
        " ".join((r.stream, r.consumer, *r.filters, r.service.replace(" ", "_"), r.ack_wait, r.max_deliver))
        for r in catalog(platform).consumers
    ]
    assert sorted(rows) == sorted(CONSUMERS.strip().splitlines())
    assert all(c.config["deliver_policy"] == "all" and not c.is_push for c in platform.consumers.values())
    for consumer in platform.consumers.values():
        assert (consumer.dlq is None) == (consumer.stream == "DLQ")


def test_totals_by_service_are_counted_from_the_catalog() -> None:
    services = dict(catalog(load(EXAMPLE)).services)
    assert services == Counter(line.split()[3].replace("_", " ") for line in CONSUMERS.strip().splitlines())
    assert (services["billing-worker"], services["notification-relay"], sum(services.values())) == (5, 8, 23)


@pytest.mark.parametrize("env", ["dev", "prod"])
def test_the_example_lints_without_errors_and_its_names_are_locked(env: str) -> None:
    found = lint(load(EXAMPLE, env), read_lock(lock_path(EXAMPLE)))
    assert [f for f in found if f.severity == "error"] == []
    assert {f.code for f in found} <= {"S03", "N05"}, "the size limits of the example are known; nothing else is"


def test_the_examples_asyncapi_document_describes_every_consumer() -> None:
    platform = load(EXAMPLE)
    assert all(consumer.contract for consumer in platform.consumers.values())
    operations = yaml.safe_load((EXAMPLE.parent / "asyncapi.yaml").read_text())["operations"]
    assert operations.keys() == platform.consumers.keys()


def test_the_example_can_be_written_as_a_valid_asyncapi_document() -> None:
    document = asyncapi.document(load(EXAMPLE))
    check(document)
    assert len(document["operations"]) >= 23


@pytest.mark.parametrize(("name", "text"), list(reference.pages()), ids=lambda value: value if len(value) < 30 else "")
def test_a_reference_page_is_current(name: str, text: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run `make docs`"
