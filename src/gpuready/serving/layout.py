"""Where things lie on a server. Every path hangs under one root, so tests can use a folder."""

from __future__ import annotations

import grp
import re
from dataclasses import dataclass
from pathlib import Path

from gpuready.serving.files import KEEP

UNIT = "gpuready-engine@{replica}.service"
ORDER = "gpuready-order.conf"
ENGINE_USER = "gpuready-engine"
_REPLICA = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)\.([0-9]+)")
"""What becomes part of a path: a slash in it would lead elsewhere."""


@dataclass(frozen=True)
class Layout:
    """The server's folders as docs/architecture.md names them."""

    root: Path = Path("/")
    engine_group: str = ENGINE_USER
    """The group that may read what an engine is started with; it holds what an operator set as flags."""

    @property
    def engine_gid(self) -> int:
        """The number of the engine's group; KEEP where there is no such group, so that nobody more may read."""
        try:
            return grp.getgrnam(self.engine_group).gr_gid
        except KeyError:
            return KEEP

    @property
    def state(self) -> Path:
        """What was verified: the record that boot, watchdog and exporter act on."""
        return self.root / "var/lib/gpuready"

    @property
    def plan(self) -> Path:
        """The plan of the host, written after it was verified."""
        return self.state / "plan.json"

    @property
    def cures(self) -> Path:
        """What would cure each deployment's last out-of-memory, for the next plan."""
        return self.state / "cures.json"

    def releases(self, deployment: str) -> Path:
        """Return the folder of all releases of a deployment, numbered 1, 2, 3 ..."""
        return self.state / "releases" / deployment

    def current(self, deployment: str, index: int) -> Path:
        """Return the link of one replica to its release."""
        return self.state / "replicas" / deployment / str(index) / "current"

    def run(self, replica: str) -> Path:
        """Return the folder of what exists only while a replica runs; `replica` is `<deployment>.<index>`."""
        return self.root / "run/gpuready" / replica

    def cache(self, replica: str) -> Path:
        """Return the one folder that a replica's engine may write and that stays."""
        return self.root / "var/cache/gpuready" / replica

    def trial(self, replica: str) -> Path:
        """Return the file that has a replica start on a release not yet proved; a reboot takes it away."""
        return self.root / "run/gpuready/.trial" / replica

    def starts(self, replica: str) -> Path:
        """Return the file of a replica's last starts, for the pause between failing ones."""
        return self.root / "run/gpuready/.starts" / replica

    @property
    def engine_unit(self) -> Path:
        """The template unit of all replicas."""
        return self.root / "etc/systemd/system/gpuready-engine@.service"

    def order(self, replica: str) -> Path:
        """Return the drop-in that names the units after which a replica's own starts."""
        return self.root / "etc/systemd/system" / f"{UNIT.format(replica=replica)}.d" / ORDER

    def orders(self) -> list[Path]:
        """Return all such drop-ins that are there."""
        return sorted((self.root / "etc/systemd/system").glob(f"{UNIT.format(replica='*')}.d/{ORDER}"))


def split_replica(replica: str) -> tuple[str, int]:
    """Split `chat.0` into its deployment and index.

    Raises:
        ValueError: when it is not of that form.
    """
    found = _REPLICA.fullmatch(replica)
    if found is None:
        raise ValueError(replica)
    return found[1], int(found[2])
