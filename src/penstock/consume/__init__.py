"""Handlers on durable consumers that are declared, or are there: several instances compete for the messages of one."""

from penstock.consume.durable import Durable, DurableOptions

__all__ = ["Durable", "DurableOptions"]
