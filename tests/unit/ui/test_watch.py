"""How often a server is looked at."""

from __future__ import annotations

import pytest

from penstock.ui.watch import pause


@pytest.mark.parametrize(
    ("took", "used", "seconds"),
    [
        (0.1, 0.01, 1.9),  # every two seconds
        (0.2, 0.2, 4.8),  # at most a share of a core
        (1.5, 0.02, 1.5),  # a slow server is left alone half of the time
        (1.2, 1.2, 10.0),  # a first look that reads everything does not make the next one late
    ],
)
def test_looks_use_a_share_of_a_core_and_leave_a_slow_server_alone(took: float, used: float, seconds: float) -> None:
    assert pause(took, used, 2.0) == pytest.approx(seconds)
