"""The simulated servers that inventories/sim names: where each is, which Debian it runs, which hardware it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """What an image is built for."""

    suite: str
    preset: str
    """A file of sim/hardware/presets without its ending, or the path of one's own."""


@dataclass(frozen=True)
class Server:
    """A server with a name of its own."""

    place: int
    """The last number of its address."""
    kind: Kind


H100 = Kind("trixie", "h100-80gb-sxm-x8")
A100 = Kind("bookworm", "a100-40gb-sxm-x4")
T4 = Kind("bookworm", "t4-x1")

KNOWN = {
    "h100-sg-01": Server(11, H100),
    "a100-la-01": Server(12, A100),
    "t4-sz-01": Server(13, T4),
}


def kind_of(name: str, suite: str = "", preset: str = "") -> Kind:
    """Return the kind of a machine: what was asked for, else what is known of its name, else the first server's."""
    known = KNOWN[name].kind if name in KNOWN else kind_of_suite(suite)
    return Kind(suite or known.suite, preset or known.preset)


def kind_of_suite(suite: str) -> Kind:
    """Return the kind of the known server that runs a Debian release; the first server's when none does."""
    return next((server.kind for server in KNOWN.values() if server.kind.suite == suite), H100)
