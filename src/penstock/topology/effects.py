"""What a change of a field may cost, in one word a field; the words stand in the field tables.

`risk.py` has the rule behind each word, the reference page its meaning.
"""

from __future__ import annotations

EDITABLE = "editable"
RECREATE = "recreate"
IMMUTABLE = "immutable"
CONTENT = "content"
ONE_WAY = "one way"
SEALS = "seals"
RETENTION = "retention"
DISCARD = "discard"
CAPTURES = "captures"
MIRROR = "mirror"
SOURCES = "sources"
FILTERS = "filters"
DELIVERY = "delivery"
EXPIRY = "expiry"
AT_CREATION = "at creation"

CHANGE_WORDS = {
    EDITABLE: "can be changed at any time",
    RECREATE: "the server refuses a change: the consumer is recreated and loses its position",
    IMMUTABLE: "can never be changed: only a new stream can have another value, and the old one's messages are lost",
    CONTENT: "raising it is safe, lowering it below what the stream holds deletes messages",
    ONE_WAY: "can be switched on, never off again",
    SEALS: "a sealed stream takes no message any more, and cannot be unsealed",
    RETENTION: "limits to interest deletes messages nobody waits for; to or from workqueue is impossible",
    DISCARD: "can be changed; back to `old`, what is above a limit is deleted",
    CAPTURES: "adding is safe; messages published to a subject taken out are no longer stored",
    MIRROR: "can only be removed, which makes the stream a normal one for good",
    SOURCES: "adding and removing is safe; a source that is changed starts over",
    FILTERS: "an added subject's backlog is skipped without a word; on an interest stream, narrowing deletes messages",
    DELIVERY: "another subject can be set; between pull and push the consumer is recreated",
    EXPIRY: "can be changed; the server deletes a consumer, with its position, that is unused for so long",
    AT_CREATION: "counts when the consumer is made; afterwards it is left as it is, and nobody's pause is undone",
}
"""The words a field's `change` may be, with their meaning for the reference."""
