"""What every part of the builder needs: refusals, places, a lock, running a program."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED, CANNOT, FAILED = 2, 3, 4
"""Exit codes: refused input; this machine cannot; tried and failed."""

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_STATE = "/var/lib/gpuready-sim"
DEFAULT_SUBNET = "10.89.37.0/24"
STATE_MARK = "this-is-gpuready-sim"

Say = Callable[[str], None]


class SimError(Exception):
    """One sentence that says what is wrong, and the remedy."""

    def __init__(self, what: str, fix: str = "", code: int = REFUSED) -> None:
        super().__init__(what)
        self.what, self.fix, self.code = what, fix, code

    def __str__(self) -> str:
        """Return the sentence that a person reads."""
        return f"{self.what}; {self.fix}." if self.fix else f"{self.what}."


def quiet(_line: str) -> None:
    """Say nothing."""


def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    check: bool = True,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program; when it fails, raise one sentence with the last line that it said."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=timeout,
            env=env,
            check=False,
        )
    except FileNotFoundError:
        if not check:
            return subprocess.CompletedProcess(list(argv), 127, "", f"{argv[0]}: not found")
        raise SimError(f"the program {argv[0]} is missing here", "run `./scripts/gpusim doctor`", CANNOT) from None
    except subprocess.TimeoutExpired:
        raise SimError(f"`{' '.join(argv)}` did not end within {timeout:.0f} s", "", FAILED) from None
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as out:
            out.write(f"$ {' '.join(argv)}\n{done.stdout}{done.stderr}")
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        where = f"its whole output is in {log}" if log else ""
        raise SimError(
            f"`{' '.join(argv)}` ended with {done.returncode} and said: {said[-1].rstrip('.')}", where, FAILED
        )
    return done


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old text or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty when there is none or it is not whole."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def tree_hash(paths: Sequence[Path], extra: str = "") -> str:
    """Return a short hash over the files (and folders' files) in paths: names and contents."""
    digest = hashlib.sha256(extra.encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(path.parent)
            # Caches of Python and of checkers say nothing about what is built.
            if file.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
                digest.update(f"\0{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Sim:
    """One simulation: its state folder, its address range, and the names derived from them."""

    state: Path
    subnet: ipaddress.IPv4Network

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Sim:
        """Read GPUREADY_SIM_STATE and GPUREADY_SIM_SUBNET; a range once brought up stays."""
        env = os.environ if env is None else env
        state = Path(env.get("GPUREADY_SIM_STATE") or DEFAULT_STATE)
        recorded = str(read_json(state / "network.json").get("subnet", ""))
        wanted = env.get("GPUREADY_SIM_SUBNET") or recorded or DEFAULT_SUBNET
        try:
            subnet = ipaddress.IPv4Network(wanted)
        except ValueError as problem:
            raise SimError(
                f"GPUREADY_SIM_SUBNET={wanted} is not an IPv4 range: {problem}", "give one such as 10.99.1.0/24"
            ) from None
        if subnet.prefixlen > 24:
            raise SimError(f"GPUREADY_SIM_SUBNET={wanted} is too small", "give a /24 or a larger range")
        if recorded and recorded != str(subnet):
            raise SimError(
                f"GPUREADY_SIM_SUBNET={subnet} differs from {recorded}, in which the simulation in {state} is up",
                "run `./scripts/gpusim down` first",
            )
        if not state.is_absolute() or len(state.parts) < 3:
            raise SimError(f"GPUREADY_SIM_STATE={state} cannot be the state folder", "give an absolute path")
        return cls(state, subnet)

    @property
    def tag(self) -> str:
        """Return what tells this simulation's bridge and table from those of another one."""
        if str(self.state) == DEFAULT_STATE:
            return ""
        return hashlib.sha256(str(self.state).encode()).hexdigest()[:6]

    @property
    def bridge(self) -> str:
        """Return the name of the bridge."""
        return f"gpusim-{self.tag}" if self.tag else "gpuready-sim0"

    @property
    def table(self) -> str:
        """Return the name of the nftables table."""
        return f"gpuready_sim_{self.tag}" if self.tag else "gpuready_sim"

    @property
    def gateway(self) -> str:
        """Return the outside's address on the bridge."""
        return str(self.subnet[1])

    def address(self, last: int) -> str:
        """Return the address with that number in the range."""
        return str(self.subnet[last])

    @property
    def pool(self) -> Path:
        """Return where the btrfs pool is mounted."""
        return self.state / "pool"

    @property
    def log(self) -> Path:
        """Return the folder of logs."""
        return self.state / "log"

    def prepare(self) -> None:
        """Make the state folder, and refuse one that belongs to something else."""
        mark = self.state / STATE_MARK
        if self.state.is_dir() and not mark.exists() and any(self.state.iterdir()):
            raise SimError(
                f"{self.state} holds files that are not the simulation's", "name another folder in GPUREADY_SIM_STATE"
            )
        self.state.mkdir(parents=True, exist_ok=True)
        self.state.chmod(0o755)
        mark.touch()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the state folder, so that two commands do not build or allot the same thing."""
        while True:
            self.prepare()
            handle = os.open(self.state, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # A `down` may have removed the folder while this command waited for it.
            if self.state.exists() and os.fstat(handle).st_ino == self.state.stat().st_ino:
                break
            os.close(handle)
        try:
            yield
        finally:
            os.close(handle)
