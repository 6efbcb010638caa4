import asyncio
import os

from faststream import FastStream
from faststream.nats import JStream, NatsBroker, PullSub
from pydantic import BaseModel

broker = NatsBroker(os.environ["NATS_URL"])
app = FastStream(broker)


class Usage(BaseModel):
    project: str
    seconds: int


@broker.subscriber(
    "usage.metered", stream=JStream("USAGE", declare=False), durable="charge", pull_sub=PullSub(batch_size=100)
)
async def charge(usage: Usage) -> None:
    assert usage.seconds >= 0


if __name__ == "__main__":
    asyncio.run(app.run())
