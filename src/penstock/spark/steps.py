"""The steps of a write, at which tests stop a process (`penstock.holds`)."""

from __future__ import annotations

from penstock.holds import VARIABLE, reached

__all__ = ["VARIABLE", "reached"]

OPENED = "opened"
INTENDED = "intended"
STORED = "stored"
ENDED = "ended"
CLOSED = "closed"
"""The sink has closed the batch; Spark's commit log is next."""
COMMITTING = "committing"
"""Spark's commit log is written; the source's commit is next."""

PURGING = "purging"
"""The source is about to delete a committed batch from a WorkQueue."""
PURGED = "purged"
"""A committed batch is deleted from a WorkQueue."""

LETTERS_WRITTEN = "letters-written"
"""A pipeline has written the bad records of a micro-batch; its first sink is next."""
FILES_STAGED = "files-staged"
"""The files of a micro-batch for a Delta or Iceberg table are written; their commit is next."""
FILES_WRITTEN = "files-written"
"""A pipeline has written a micro-batch to a table; the next sink, or Spark's commit log, is next."""
BATCH_WRITTEN = "batch-written"
"""A pipeline has written a micro-batch to all its sinks; Spark's commit log is next."""
