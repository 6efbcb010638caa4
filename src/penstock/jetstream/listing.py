"""Streams that are listed again and again: only those whose answer differs from the last one are parsed.

A list of 500 streams is half a megabyte of JSON, and from one look to the next a few numbers of it change.
"""

from __future__ import annotations

import json

from penstock.jetstream.model import Json, StreamInfo

BEGIN = b'{"config":'
"""So begins every stream of a page. Quotes inside of texts are escaped, so it is nowhere else."""
TIMESTAMP = b',"ts":"'
"""When the server answered: the only field that always differs, and the last of a stream."""


class StreamMemory:
    """Streams as they were listed last. Those that are the same now are the same objects.

    `raw["ts"]` of a stream is then the time of the first answer that was like this.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Json] = {}
        self._seen: dict[bytes, Json] = {}
        self._streams: dict[str, StreamInfo] = {}

    def begin(self) -> None:
        """Forget the pages of a listing that was not completed."""
        self._seen = {}

    def page(self, data: bytes) -> Json:
        """Parse one page of the listing. Pages that are written otherwise than those of today are parsed as a whole."""
        first, *parts = data.split(BEGIN)
        short, found = [first], list[tuple[bytes, Json | None]]()
        for part in parts:
            text, _, rest = part.rpartition(TIMESTAMP)
            end = rest.find(b'"')
            if not text or rest[end : end + 2] != b'"}':
                return dict(json.loads(data))
            known = self._known.get(text)
            found.append((text, known))
            short.append(b"0" + rest[end + 2 :] if known else BEGIN + part)
        answer: Json = json.loads(b"".join(short))
        items = answer.get("streams") or []
        if not found or len(items) != len(found):
            return dict(json.loads(data))
        answer["streams"] = [known or item for item, (_, known) in zip(items, found, strict=True)]
        self._seen |= zip((text for text, _ in found), answer["streams"], strict=True)
        return answer

    def streams(self, items: list[Json]) -> list[StreamInfo]:
        """The streams of a complete listing, whose items come from `page`."""
        found = [self._stream(item) for item in items]
        self._known, self._seen = self._seen, {}
        self._streams = {one.name: one for one in found}
        return found

    def _stream(self, item: Json) -> StreamInfo:
        known = self._streams.get(item["config"]["name"])
        return known if known and known.raw is item else StreamInfo.parse(item)
