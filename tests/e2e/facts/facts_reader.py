"""A named reader that writes down what it fetched and what it confirmed; for tests that kill it.

    python facts_reader.py URL CONSUMER LOG LIMIT
    GATEWAY_TOKEN=… python facts_reader.py --gateway URL CONSUMER LOG LIMIT

Each line of the log is `F` or `C` and the sequences of a page, written after the call has returned and in one write,
so that the order of the lines is the order of events, whichever process wrote them. It ends on SIGTERM only.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

from penstock.errors import PenstockError
from penstock.facts import BlockingFacts, Page, StaleReceipt
from penstock.settings import Settings


class Service(Protocol):
    """What a reader needs: facts, from the broker or through a gateway."""

    def fetch_facts(self, consumer_name: str, limit: int, *, wait: float) -> Page: ...
    def confirm_receipt(self, consumer_name: str, receipt: str | None) -> object: ...


def write(log: int, kind: str, sequences: list[int]) -> None:
    os.write(log, f"{kind} {','.join(map(str, sequences))}\n".encode())


def read(facts: Service, consumer: str, log: int, limit: int) -> None:
    while True:
        try:
            page = facts.fetch_facts(consumer, limit, wait=0.5)
            if not page.facts:
                continue
            sequences = [fact.sequence for fact in page.facts]
            write(log, "F", sequences)
            if confirmed(facts, consumer, page.receipt):
                write(log, "C", sequences)
        except PenstockError as exc:
            if not (exc.retryable or isinstance(exc, StaleReceipt)):
                raise
            time.sleep(0.02)


def confirmed(facts: Service, consumer: str, receipt: str | None) -> bool:
    """Confirm until there is a clear answer."""
    while True:
        try:
            facts.confirm_receipt(consumer, receipt)
            return True
        except StaleReceipt:
            return False
        except PenstockError as exc:
            if not exc.retryable:
                raise
            time.sleep(0.02)


def main(arguments: list[str]) -> None:
    gateway = arguments[0] == "--gateway"
    url, consumer, path, limit = arguments[-4:]
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    facts: Service
    if gateway:
        from penstock.gateway import BlockingGatewayClient, GatewayLogin

        facts = BlockingGatewayClient(url, GatewayLogin(token=os.environ["GATEWAY_TOKEN"]), timeout=5)
    else:
        facts = BlockingFacts(Settings(servers=(url,), timeout=2))
    read(facts, consumer, log, int(limit))


if __name__ == "__main__":
    main(sys.argv[1:])
