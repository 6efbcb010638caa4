"""Runs handlers on declared or existing durable consumers: several instances compete for the messages of one."""

from penstock.consume.durable import Durable, DurableOptions

__all__ = ["Durable", "DurableOptions"]
