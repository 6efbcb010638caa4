"""Facts: pages for named readers with receipts, and appends that happen once."""

from penstock.facts.blocking import BlockingFacts
from penstock.facts.errors import FactConflict, ForeignReceipt, ForgedReceipt, ReceiptRefused, StaleReceipt
from penstock.facts.fact import Appended, Fact, NewFact
from penstock.facts.reader import Confirmation, Page
from penstock.facts.service import Facts

__all__ = [
    "Appended",
    "BlockingFacts",
    "Confirmation",
    "Fact",
    "FactConflict",
    "Facts",
    "ForeignReceipt",
    "ForgedReceipt",
    "NewFact",
    "Page",
    "ReceiptRefused",
    "StaleReceipt",
]
