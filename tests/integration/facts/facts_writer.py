"""Appends facts 0 to COUNT in order and prints each when it is stored; for tests that kill it.

python facts_writer.py URL COUNT
"""

from __future__ import annotations

import sys

from penstock.facts import BlockingFacts
from penstock.settings import Settings


def main(url: str, count: int) -> None:
    with BlockingFacts(Settings(servers=(url,))) as facts:
        for number in range(count):
            facts.append_fact("facts.n", str(number), b"%d" % number)
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
