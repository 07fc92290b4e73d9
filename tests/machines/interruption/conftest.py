"""The count of interruptions over all tests of this folder, printed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sim.machine.common import CHECKOUT, Sim
from tests.machines.conftest import Factory, ensure_prepared
from tests.machines.interruption.points import Lanes
from tests.machines.interruption.tally import Tally

REPORT = CHECKOUT / ".cache/reports/interruption.json"
_tally = Tally()


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    """The points of all tests."""
    yield _tally
    _tally.write(REPORT)


@pytest.fixture(scope="session")
def lanes(sim: Sim, machines: Factory, tally: Tally) -> Lanes:
    """What takes points to their end, each on a machine of its own."""
    return Lanes(sim, machines, tally)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the count, also when every test passes."""
    if _tally.points:
        terminalreporter.write_line(_tally.summary())


@pytest.fixture(scope="session")
def prepared_image(sim: Sim, machines: Factory) -> str:
    """The name of the image of a server that has the large parts: the toolkit and the engine."""
    return ensure_prepared(sim, machines)
