"""The grants between two accounts so that a stream of one can read a stream of the other. Pure.

The reading server needs exactly three permissions in the origin's account: to reset the one consumer, to receive its
deliveries, and to answer its flow-control requests. With these it reads through a consumer that the origin's owner
created.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.subjects import api_prefix

API = api_prefix(None)
_DOMAIN = re.compile(r"\$JS\.[^.]+\.API")


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of one source, or mirror, as server configuration."""

    stream: str
    """The origin."""
    consumer: str
    api: str
    """The prefix under which the reading account has the origin's API."""
    deliver_subject: str

    def exports(self) -> str:
        """Return the exports of the origin's account."""
        return "\n".join(
            [
                "exports: [",
                f'  {{ service: "{self._reset}" }}',
                f'  {{ stream: "{self.deliver_subject}" }}',
                f'  {{ service: "{self._flow}" }}',
                "]",
            ]
        )

    def imports(self, account: str = "ORIGINS_ACCOUNT") -> str:
        """Return the imports of the reading account."""
        here = self.api + self._reset.removeprefix(API)
        return "\n".join(
            [
                "imports: [",
                f'  {{ service: {{ account: {account}, subject: "{self._reset}" }}, to: "{here}" }}',
                f'  {{ stream: {{ account: {account}, subject: "{self.deliver_subject}" }} }}',
                f'  {{ service: {{ account: {account}, subject: "{self._flow}" }} }}',
                "]",
            ]
        )

    @property
    def _reset(self) -> str:
        return f"{API}.CONSUMER.RESET.{self.stream}.{self.consumer}"

    @property
    def _flow(self) -> str:
        return f"$JS.FC.{self.stream}.{self.consumer}.>"


def needs_grant(api: str | None) -> bool:
    """Whether a prefix leads to another account: that of a domain leads to the same account elsewhere."""
    return api is not None and api != API and not _DOMAIN.fullmatch(api)
