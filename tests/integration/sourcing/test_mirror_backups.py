"""Restoring a saved mirror while the server fails: it still removes the directories of the deleted stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.streams import Streams

from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.sourcing import mirrors
from penstock.sourcing.migrate import SourceMigration
from penstock.testing import stream_data
from penstock.wire.blocking import run

MIRROR = {"name": "ORIGIN"}
INTERNAL = b'{"error": {"code": 500, "err_code": 10062, "description": "restore failed: could not create a directory"}}'
FINAL = b'{"error": {"code": 400, "err_code": 10058, "description": "stream name already in use"}}'


@pytest.fixture
def backup(nats_server: EmbeddedServer, streams: Streams, tmp_path: Path) -> mirrors.Backup:
    """A stream with ten numbers, saved to a file, and deleted."""
    streams.make("COPY")
    streams.number("copy.a", 1, 10)
    saved = mirrors.Backup(tmp_path / "backup", "COPY")
    migration = SourceMigration(stream="COPY", old=MIRROR, new=MIRROR, consumer={}, mirror=True)
    mirrors.save(nats_server.settings, migration, saved)
    run(streams.api.delete_stream("COPY"))
    return saved


def fail_first(monkeypatch: pytest.MonkeyPatch, answers: list[bytes]) -> None:
    """Let the first restores end with these answers of the server, and all others reach it."""
    real = mirrors._restore

    def restore(settings: Settings, backup: mirrors.Backup) -> None:
        if answers:
            mirrors._refused(backup, answers.pop(0))
        real(settings, backup)

    monkeypatch.setattr(mirrors, "_restore", restore)


def test_a_restore_that_fails_inside_the_server_is_tried_again(
    nats_server: EmbeddedServer, backup: mirrors.Backup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(monkeypatch, [INTERNAL, INTERNAL])
    mirrors.restore(nats_server.settings, backup)
    assert stream_data(nats_server.settings, "COPY") == [b"%d" % n for n in range(1, 11)]


def test_a_restore_that_is_refused_is_not_tried_again_and_keeps_the_file(
    nats_server: EmbeddedServer, backup: mirrors.Backup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(monkeypatch, [FINAL])
    with pytest.raises(mirrors.NotRestored, match=r"already in use.*its messages are in"):
        mirrors.restore(nats_server.settings, backup)
    assert backup.data.stat().st_size > 0


def test_a_backup_is_for_its_owner_alone(backup: mirrors.Backup) -> None:
    assert [file.stat().st_mode & 0o777 for file in (backup.data, backup.about)] == [0o600, 0o600]
