from pydantic import BaseModel

import penstock

app = penstock.App()


class Usage(BaseModel):
    project: str
    seconds: int


@app.consumer("charge")
async def charge(usage: Usage) -> None:
    assert usage.seconds >= 0


if __name__ == "__main__":
    app.run()
