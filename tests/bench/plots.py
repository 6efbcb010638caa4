"""A picture of a benchmark: a bar for each contestant, as long as its median rate, with the spread of its rounds."""

from __future__ import annotations

from html import escape

from harness import Bench, Contestant

WIDTH, NAMES, VALUES, ROW, TOP = 860, 260, 110, 26, 46
OURS, PEER, LIMIT = "#2563eb", "#d97706", "#9ca3af"
PEERS = ("nats-py", "natsrpy", "Kafka", "FastStream", "server's own")
LEGEND = ((OURS, "Penstock"), (PEER, "a peer"), (LIMIT, "the limit: prebuilt bytes, answers only counted"))


def plot(bench: Bench) -> str:
    """The benchmark as SVG; readable on white and on black."""
    rows = list(bench.contestants.values())
    most = max((max(one.rates) for one in rows), default=1.0)
    scale = (WIDTH - NAMES - VALUES) / most
    height = TOP + ROW * len(rows) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(bench.name)}: median {escape(bench.unit)} of each contestant" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#6b7280">'
    ]
    lines += _legend(bench, {_colour(one.name) for one in rows})
    for place, one in enumerate(rows):
        lines += _bar(one, _colour(one.name), TOP + ROW * place, scale)
    return "\n".join([*lines, "</svg>", ""])


def _colour(name: str) -> str:
    if name.startswith(PEERS):
        return PEER
    return LIMIT if name.startswith("raw") else OURS


def _legend(bench: Bench, used: set[str]) -> list[str]:
    lines, at = [f'<text x="8" y="18" font-weight="600">{escape(bench.name)}, {escape(bench.unit)}</text>'], NAMES
    for colour, text in LEGEND:
        if colour in used:
            lines.append(f'<rect x="{at}" y="8" width="12" height="12" rx="2" fill="{colour}"/>')
            lines.append(f'<text x="{at + 18}" y="18">{escape(text)}</text>')
            at += 50 + 7 * len(text)
    return lines


def _bar(one: Contestant, colour: str, top: int, scale: float) -> list[str]:
    middle, end, thick = top + ROW // 2, NAMES + one.median * scale, ROW - 8
    least, most = NAMES + min(one.rates) * scale, NAMES + max(one.rates) * scale
    return [
        f'<text x="{NAMES - 8}" y="{middle + 4}" text-anchor="end">{escape(one.name)}</text>',
        f'<rect x="{NAMES}" y="{top + 4}" width="{max(end - NAMES, 1):.1f}" height="{thick}" rx="2" fill="{colour}"/>',
        f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{middle}" y2="{middle}" stroke="#6b7280" stroke-width="1.5"/>',
        f'<text x="{max(end, most) + 8:.1f}" y="{middle + 4}">{one.median:,.0f}</text>',
    ]
