"""The API for service teams: handlers on declared consumers and in groups, in one `App`."""

from penstock.app.app import App
from penstock.app.message import Message

__all__ = ["App", "Message"]
