"""The options that say how to reach a cluster, against servers that ask for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest
from pyspark.sql.types import StringType, StructType

from penstock.errors import AccessDenied, PenstockError
from penstock.spark.datasource import COLUMNS, JetStreamDataSource
from penstock.spark.options import source_options
from penstock.testing import Certificates
from penstock.wire.blocking import run

ROWS = StructType().add("data", StringType())


class Guarded:
    """A server that lets in only those who give the right options, with a stream of five messages."""

    def __init__(self, port: int, open_streams: Callable[[Any], Any], options: dict[str, str]) -> None:
        self.options = {"servers": f"nats://127.0.0.1:{port}", "stream": "S", "timeout": "5", **options}
        streams = open_streams(source_options(self.options, streaming=False).settings)
        run(streams.api.create_stream({"name": "S", "subjects": ["s.>"], "allow_atomic": True}))
        streams.number("s.a", 1, 5)

    def reads(self, **changed: str | None) -> list[int]:
        """What a batch read gives."""
        given = {name: value for name, value in {**self.options, **changed}.items() if value is not None}
        reader: Any = JetStreamDataSource(given).reader(COLUMNS)
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [n for batch in batches for n in batch.column("sequence").to_pylist()]

    def check(self, refused: type[PenstockError], **wrong: str | None) -> None:
        """Reading works, and all that the driver does before a write; with wrong options it does not."""
        assert self.reads() == [1, 2, 3, 4, 5]
        JetStreamDataSource({**self.options, "subject": "s.b"}).writer(ROWS, overwrite=False)
        with pytest.raises(refused):
            self.reads(**wrong)


@pytest.fixture
def guarded(serve: Callable[[str], int], open_streams: Callable[[Any], Any], tmp_path: Path) -> Callable[..., Guarded]:
    def start(config: str, jetstream: str = "", **options: str) -> Guarded:
        port = serve(f'jetstream {{ store_dir: "{tmp_path / "data"}"{jetstream} }}\n{config}')
        return Guarded(port, open_streams, options)

    return start


def test_a_token_lets_in(guarded: Callable[..., Guarded]) -> None:
    guarded('authorization { token: "t0ken" }', token="t0ken").check(AccessDenied, token="other")


def test_user_and_password_let_in(guarded: Callable[..., Guarded]) -> None:
    server = guarded('authorization { user: "u", password: "p" }', user="u", password="p")
    server.check(AccessDenied, password="q")


def test_a_credentials_file_lets_in(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    user = nkeys.from_seed(nkeys.encode_seed(hashlib.sha256(b"user").digest(), nkeys.PREFIX_BYTE_USER))
    creds = tmp_path / "user.creds"
    creds.write_text(f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n")
    known = f'authorization {{ users: [ {{ nkey: "{user.public_key.decode()}" }} ] }}'
    guarded(known, credentials=str(creds)).check(AccessDenied, credentials=None)


@pytest.mark.parametrize("first", ["false", "true"], ids=["TLS after INFO", "TLS before anything else"])
def test_a_client_certificate_lets_in(
    guarded: Callable[..., Guarded], tls_certificates: Certificates, first: str
) -> None:
    one = tls_certificates
    files = f'cert_file: "{one.server_cert}", key_file: "{one.server_key}", ca_file: "{one.ca}"'
    own = {"tlsCa": one.ca, "tlsCert": one.client_cert, "tlsKey": one.client_key, "tlsFirst": first}
    server = guarded(f"tls {{ {files}, verify: true, handshake_first: {first} }}", **own)
    server.check(AccessDenied, tlsCert=None, tlsKey=None)


def test_a_stream_of_another_domain_is_reached_by_its_name(guarded: Callable[..., Guarded]) -> None:
    guarded("", jetstream=", domain: hub", domain="hub").check(PenstockError, domain="elsewhere")
