"""Takes a replica out of the gateway's hands before it stops, and lets it in again once it is proved.

HAProxy's state `drain` keeps a server's running requests and gives it no new ones. Those go to the deployment's other
replicas; where there is none, to the backend's server `hold`, behind which nothing listens: there they are tried again
every second until a replica takes them. Tried with HAProxy 2.6 and 3.0.

Every worker is asked, by way of the master: after a reload the old one still has streams, and the new one has forgotten
who was drained. So the state is set anew each time one looks, and a gateway that starts or reloads has nobody drained.
What was held when somebody reloads in the middle of a drain is answered 503 once it was held long enough: an old
worker takes no orders any more.
"""

from __future__ import annotations

import csv
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpuready.operations.service import workers

RUNTIME = Path("/run/gpuready-gateway")
PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""A master that reloads does not answer for a moment."""
UP_SECONDS = 5.0
"""A server with a health check is up again with its next one, at most a second later."""
FORCED_DRAIN = 8
_UP = ("UP", "no check")
_TABLE = "# pxname,"


class Silent(Exception):
    """HAProxy's master runs and does not answer."""


@dataclass(frozen=True)
class Seat:
    """One server of the gateway as one worker sees it."""

    pid: int
    backend: str
    name: str
    is_drained: bool
    is_up: bool
    """By its health check, where it has one; not where it is drained."""
    in_flight: int
    port: int

    @property
    def path(self) -> str:
        """What commands call it."""
        return f"{self.backend}/{self.name}"

    @property
    def is_usable(self) -> bool:
        """Say whether it takes new requests."""
        return self.is_up and not self.is_drained


@dataclass
class Drain:
    """The gateway's side of a change of replicas; `seconds` is how long requests in flight may take to end."""

    seconds: float
    runtime: Path = RUNTIME
    notes: list[str] = field(default_factory=list)
    """What could not be done as it should, in sentences."""

    @contextmanager
    def out(self, replica: str, port: int, running: Callable[[], int | None]) -> Iterator[None]:
        """Have a replica get no new requests and finish those that it has; let it in again on its port afterwards.

        `running` says how many requests the engine itself counts; None where it does not say.
        """
        self.take_out(replica, running)
        try:
            yield
        finally:
            self.let_in(replica, port)

    def take_out(self, replica: str, running: Callable[[], int | None]) -> None:
        """Return once a replica has nothing in flight, seen twice, or the deadline is over; then that is noted."""
        end = time.monotonic() + self.seconds
        quiet = 0
        try:
            while self._close(replica):
                busy = self._in_flight(replica)
                own = running() or 0
                quiet = 0 if busy or own else quiet + 1
                if quiet > 1:
                    return
                if time.monotonic() >= end:
                    left = f"{max(busy, own)} request{'s' if max(busy, own) > 1 else ''} in flight"
                    self.notes.append(f"{replica} was stopped with {left} after {self.seconds:.0f} s of draining")
                    return
                time.sleep(PAUSE_SECONDS)
        except Silent:
            self.notes.append(f"{replica} was not drained: the gateway's HAProxy runs and its master does not answer")

    def let_in(self, replica: str, port: int) -> bool:
        """Have the gateway give a replica requests again, if it looks for it on that port; say whether that was new.

        Where the port has changed, the gateway's next configuration, which knows it, lets the replica in.
        """
        try:
            drained = [one for one in self._seats(replica) if one.is_drained and one.port == port]
            for one in drained:
                self._ask(one.pid, f"set server {one.path} state ready")
            end = time.monotonic() + UP_SECONDS
            while drained and time.monotonic() < end and not any(one.is_usable for one in self._seats(replica)):
                time.sleep(PAUSE_SECONDS)
        except Silent:
            return False
        return bool(drained)

    def is_out(self, replica: str, port: int) -> bool:
        """Say whether a replica is drained, as an interrupted run leaves it."""
        try:
            return any(one.is_drained and one.port == port for one in self._seats(replica))
        except Silent:
            return False

    def _close(self, replica: str) -> bool:
        """Give a replica no new requests; False where that is not possible or nobody sends it any."""
        everyone = self._all_seats()
        own = [one for one in everyone if one.name == replica]
        for one in own:
            beside = [other for other in everyone if (other.pid, other.backend) == (one.pid, one.backend)]
            if not any(other.is_usable for other in beside if other.name != replica):
                self.notes.append(
                    f"{replica} was not drained: backend {one.backend} of the gateway's configuration has no server "
                    f"that holds its requests, as the shipped template has"
                )
                return False
        for one in own:
            if not one.is_drained:
                self._ask(one.pid, f"set server {one.path} state drain")
        return bool(own)

    def _in_flight(self, replica: str) -> int:
        return sum(one.in_flight for one in self._seats(replica))

    def _seats(self, replica: str) -> list[Seat]:
        return [one for one in self._all_seats() if one.name == replica]

    def _all_seats(self) -> list[Seat]:
        """Return the servers of all workers; none where no gateway runs."""
        end = time.monotonic() + ANSWER_SECONDS
        while (self.runtime / "master.sock").exists():
            known = workers(self.runtime)
            told = {pid: self._ask(pid, "show stat") for pid in sorted(known.current | known.old)} if known else {}
            # An old worker may end meanwhile; one that takes new requests must be known, and at its start says nothing.
            if known and known.current and all(told[pid].startswith(_TABLE) for pid in known.current):
                states = {pid: self._ask(pid, "show servers state") for pid in told}
                return [seat for pid, text in told.items() for seat in seats_from(pid, text, states[pid])]
            if time.monotonic() >= end:
                raise Silent
            time.sleep(PAUSE_SECONDS)
        return []

    def _ask(self, pid: int, command: str) -> str:
        """Return a worker's answer; empty where it ended meanwhile."""
        said = b""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
                asked.settimeout(ANSWER_SECONDS)
                asked.connect(str(self.runtime / "master.sock"))
                asked.sendall(f"@!{pid} {command}\n".encode())
                asked.shutdown(socket.SHUT_WR)
                while part := asked.recv(65536):
                    said += part
        except OSError:
            return ""
        return said.decode(errors="replace")


def seats_from(pid: int, stat: str, state: str) -> list[Seat]:
    """Read a worker's answers to `show stat` (CSV) and `show servers state` (words), both with their columns' names.

    The first tells a server that is drained as DOWN where its health check fails, so what was asked of it is read from
    the second: `srv_admin_state`, in which 8 is a forced drain.
    """
    rows = csv.DictReader(stat.removeprefix("# ").splitlines()) if stat.startswith(_TABLE) else ()
    told = {(row["pxname"], row["svname"]): row for row in rows}
    lines = [line.removeprefix("# ").split() for line in state.splitlines()[1:] if line.strip()]
    found = []
    for line in lines[1:]:
        known = dict(zip(lines[0], line))  # noqa: B905 - Python 3.10 reads it
        row = told.get((known["be_name"], known["srv_name"]), {})
        found.append(
            Seat(
                pid=pid,
                backend=known["be_name"],
                name=known["srv_name"],
                is_drained=bool(int(known["srv_admin_state"]) & FORCED_DRAIN),
                is_up=(row.get("status") or "").startswith(_UP),
                in_flight=int(row.get("scur") or 0),
                port=int(known["srv_port"]),
            )
        )
    return found
