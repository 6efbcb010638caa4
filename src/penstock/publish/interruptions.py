"""What can end a fast ingest early. Each says up to which position everything is stored."""

from __future__ import annotations

from penstock.errors import ApiError, ConfigError, DataLoss, InvalidConfiguration, OutcomeUnknown


class FastIngestDisabled(InvalidConfiguration):
    """The stream does not take fast ingest."""

    def __str__(self) -> str:
        return (
            f"{self.what} does not take fast ingest (server error {self.err_code}); set `allow_batched: true` on it, "
            "or publish atomically or plainly"
        )


class IngestGap(DataLoss):
    """Messages were lost on the way to the stream. Everything before them is stored, nothing after them is."""

    def __init__(self, stream: str, stored: int, last: int) -> None:
        super().__init__(stream, stored, last)
        self.stream = stream
        self.stored = stored
        """Position of the last message stored."""
        self.last = last
        """Position of the last message known to be lost."""

    def __str__(self) -> str:
        return (
            f"fast ingest into {self.stream!r}: messages {self.stored + 1} to {self.last} never reached the stream; "
            f"the first {self.stored} are stored, so publish again from message {self.stored + 1}, "
            'or ingest with on_gap="resend"'
        )


class MessageRefused(ApiError):
    """The server read one message and would not store it. Everything before it is stored, nothing after it is."""

    def __init__(self, what: str, code: int, err_code: int, description: str, position: int) -> None:
        super().__init__(what, code, err_code, description)
        self.args = (what, code, err_code, description, position)
        self.position = position

    @property
    def stored(self) -> int:
        """Position of the last message stored."""
        return self.position - 1

    def __str__(self) -> str:
        return f"{super().__str__()}; the {self.stored} messages before message {self.position} are stored"


class WrongStream(ConfigError):
    """A message's subject does not belong to the stream of the ingest."""

    def __init__(self, subject: str, position: int, stream: str, found: str, tried_for: float = 0.0) -> None:
        super().__init__(subject, position, stream, found, tried_for)
        self.subject = subject
        self.position = position
        self.stream = stream
        self.found = found
        self.tried_for = tried_for
        """Seconds for which the message was tried while no stream took it; 0 when another stream answered."""

    @property
    def stored(self) -> int:
        """Position of the last message stored."""
        return self.position - 1

    def __str__(self) -> str:
        other = f"stream {self.found!r}" if self.found else "no stream"
        tried = f" (tried for {self.tried_for:.1f} s)" if self.tried_for else ""
        return (
            f"message {self.position}: {other} takes subject {self.subject!r}{tried}, not {self.stream!r}; "
            f"the {self.stored} messages before it are stored"
        )


class IngestInterrupted(OutcomeUnknown):
    """The server forgot the batch before it said how much of it is stored."""

    def __init__(self, stream: str, stored: int, in_doubt: int) -> None:
        super().__init__(stream, stored, in_doubt)
        self.stream = stream
        self.stored = stored
        """Position of the last message known to be stored."""
        self.in_doubt = in_doubt
        """How many messages after it may or may not be stored."""

    def __str__(self) -> str:
        return (
            f"fast ingest into {self.stream!r} was interrupted: the first {self.stored} messages are stored, the next "
            f"{self.in_doubt} may be; look at the end of the stream, then publish again from message {self.stored + 1} "
            "(with message ids nothing is stored twice within the stream's duplicate window)"
        )
