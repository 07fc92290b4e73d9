"""Counts the points at which a run was interrupted, and those after which one run did not converge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """One interruption and what became of it."""

    side: str
    """Who was hit: controller, server, network, packages, disk, lock or clock."""
    name: str
    seconds: float
    problem: str = ""


@dataclass
class Tally:
    """All points of one test run; points of two lanes may end at the same time."""

    points: list[Point] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def point(self, side: str, name: str) -> Iterator[None]:
        """Note one point, and as its failure what is raised inside."""
        started, problem = time.monotonic(), ""
        try:
            yield
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            point = Point(side, name, round(time.monotonic() - started, 1), problem)
            with self._lock:
                self.points.append(point)
                print(f"{side}: {name}: {problem or 'converged'} ({point.seconds} s)", flush=True)

    @property
    def failures(self) -> list[Point]:
        """The points after which one run did not converge."""
        return [point for point in self.points if point.problem]

    def summary(self) -> str:
        """Return the counts in one line."""
        sides = dict.fromkeys(point.side for point in self.points)
        counts = ", ".join(f"{sum(one.side == side for one in self.points)} {side}" for side in sides)
        return f"killer: {len(self.points)} points ({counts}), {len(self.failures)} failures"

    def write(self, file: Path) -> None:
        """Write all points for whoever reads reports."""
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "points": len(self.points),
            "failures": len(self.failures),
            "all": [asdict(one) for one in self.points],
        }
        file.write_text(json.dumps(whole, indent=2) + "\n")
