"""The files of a new project, with `<<name>>` for what differs."""

from __future__ import annotations

import json

from penstock.topology.schema import schema

PLATFORM = """\
# yaml-language-server: $schema=penstock.schema.json
# What <<name>> needs on the server: `penstock plan` shows what would change, `penstock apply` makes it so.
name: <<name>>

environments:
  dev: {servers: [<<servers>>]}

streams:
  <<stream>>:
    description: Events as they happen
    subjects: [<<captured>>]
    max_age: 7d
  <<results>>:
    description: What <<name>> makes of them, each once
    subjects: [handled.>, penstock.done.<<results>>.>]
    max_age: 7d
    allow_atomic: true
  DLQ:
    description: Events that could not be handled, with the reason
    subjects: [dlq.>]
    max_age: 30d

consumers:
  <<consumer>>:
    stream: <<stream>>
    filter: <<subject>>
    service: <<name>>
    owner: "<<owner>>"
    purpose: Handles each event once
    ack_wait: 30s
    max_deliver: 5
    dlq: <<dlq>>
"""

SERVICE = '''\
"""<<name>>: handles events of <<subject>>."""

from dataclasses import dataclass
from pathlib import Path

import penstock

app = penstock.App(Path(__file__).with_name("penstock.yaml"))


@dataclass
class Event:
    """What an event must have; one that has it not becomes a dead letter."""

    id: str
    amount: float


@app.consumer("<<consumer>>")
async def handle(event: Event, message: penstock.Message) -> None:
    if event.amount < 0:
        raise penstock.Reject(f"an amount of {event.amount:g} makes no sense")
    async with message.atomic("<<results>>") as batch:  # stored once, however often the event comes
        batch.add("handled.<<subject>>", {"id": event.id, "doubled": event.amount * 2})


if __name__ == "__main__":
    app.run()
'''

TESTS = '''\
"""The same test in memory, and on a real server of the test's own."""

from typing import Any

from penstock.testing import TestApp
from service import app


def check(test: Any) -> None:
    test.send("<<subject>>", {"id": "a", "amount": 2.5})
    test.send("<<subject>>", {"id": "b", "amount": -1})
    test.send("<<subject>>", {"id": "c"})
    test.done()
    assert [one.data for one in test.stored("<<results>>")] == [b'{"id":"a","doubled":5.0}']
    assert sorted(letter.body for letter in test.letters()) == [b'{"id":"b","amount":-1}', b'{"id":"c"}']


def test_in_memory() -> None:
    with TestApp(app) as test:
        check(test)


def test_on_a_server(nats_server: Any) -> None:
    with TestApp(app, nats_server) as test:
        check(test)
'''

README = """\
# <<name>>

`service.py` handles events of `<<subject>>`; `penstock.yaml` declares the streams and the consumer that it needs.

```
pip install 'penstock-nats[testing]'
penstock server                        # a nats-server for this machine, in a terminal of its own; or use your own
penstock apply                         # makes what penstock.yaml declares
penstock run service:app --reload      # handles events; starts again when a file changes
```

In another terminal:

```
export PENSTOCK_SERVERS=<<urls>>
echo '{"id": "a", "amount": 2.5}' | penstock publish <<subject>>
penstock view <<results>> --subject 'handled.>'     # what became of it
penstock status                        # how far the service is
penstock dlq ls                        # what it gave up on
pytest                                 # in memory, and on a real server of the test's own
```
"""

FILES = {
    "penstock.yaml": PLATFORM,
    "service.py": SERVICE,
    "test_service.py": TESTS,
    "README.md": README,
    "penstock.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n",  # for editors
}
"""By their names."""
