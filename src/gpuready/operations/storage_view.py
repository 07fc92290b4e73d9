"""Shows this process alone what will be mounted at the store of models, before it is mounted.

Configuration and headers of models are read before the first change, so what is declared is mounted in a mount
namespace that ends with the process. A share is mounted by the kernel itself, without the NFS client's programs: a
blank server has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuready.operations.machine import Machine
from gpuready.operations.storage import facts as storage_facts
from gpuready.outcome import Failure, Refusal
from gpuready.planning import storage
from gpuready.planning.sources import STORE
from gpuready.planning.storage import Declared

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h
CONNECT_SECONDS = 10
MOUNT_SECONDS = 20
NFS_PORT = 2049
_VERSIONS = ("4.2", "4.1", "4.0", "3")
"""Of NFS, the newest first, as mount.nfs asks for them."""
# A dead server must not hold the question for ever; what is read here is small, and read again when it matters.
_SHORT = "soft,timeo=50,retrans=2"
# Not even the journal is replayed: nothing is written.
_UNTOUCHED = {"ext4": "ro,noload", "xfs": "ro,norecovery"}


def enter(wanted: Declared, facts: Mapping[str, Any]) -> None:
    """Have this process see what is declared at STORE.

    Raises:
        Refusal: where the share or device cannot be mounted, with what keeps it.
    """
    try:
        _leave_the_others()
        with _mount_point() as place:
            if wanted.is_share:
                _mount_share(wanted, place)
            else:
                device = storage.with_source(facts["blocks"], wanted.source)[0]
                fstype = str(device["fstype"])
                _mount(["-t", fstype, "-o", _UNTOUCHED[fstype], str(device["path"]), place])
    except OSError as error:
        raise _refused(wanted, str(error.strerror or error), "run with the rights of root (become)") from error
    except _Unmounted as error:
        fix = "see dmesg on the server"
        if wanted.is_share:
            fix = "see the share's address and exports, the network and its server's firewall"
        raise _refused(wanted, str(error), fix) from error


def see(machine: Machine, wanted: Declared) -> None:
    """Have a check see at STORE what is declared; on a disk that is yet to be formatted there is nothing to see."""
    found = storage_facts(machine, wanted)
    if storage.to_format(wanted, found) is None:
        enter(wanted, found)


class _Unmounted(Exception):
    """What mount(8) or the network said."""


def _refused(wanted: Declared, why: str, fix: str) -> Refusal:
    return Refusal(Failure("storage.unseen", f"{wanted.key} cannot be mounted", why, fix))


def _leave_the_others() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount(["--make-rprivate", "/"])


@contextlib.contextmanager
def _mount_point() -> Iterator[str]:
    """Give a folder at STORE; where there is none, its parent is laid over with a copy that has one."""
    place = Path(STORE)
    parent = place.parent
    if place.is_dir():
        yield STORE
        return
    handle = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _mount(["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(parent)])
        for kept in Path(f"/proc/{os.getpid()}/fd/{handle}").iterdir():
            shown = parent / kept.name
            if kept.is_symlink():
                shown.symlink_to(kept.readlink())
            elif kept.is_dir():
                shown.mkdir()
                # As it is: made canonical, the path would lead to what lies over it.
                _mount(["--no-canonicalize", "--rbind", str(kept), str(shown)])
        place.mkdir()
        yield STORE
    except _Unmounted:
        # What is asked after this must see the server as it is.
        subprocess.run(["umount", "--recursive", str(parent)], capture_output=True, check=False)
        raise
    finally:
        os.close(handle)


def _mount(words: list[str]) -> None:
    began = time.monotonic()
    try:
        done = subprocess.run(
            ["mount", *words], capture_output=True, text=True, errors="replace", check=False, timeout=MOUNT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _Unmounted(f"no answer within {MOUNT_SECONDS} s") from None
    if done.returncode and time.monotonic() - began > CONNECT_SECONDS:
        # What the kernel calls it then says nothing about the time: NFS4: Couldn't follow remote path.
        raise _Unmounted(f"no answer within {time.monotonic() - began:.0f} s")
    if done.returncode:
        first = (done.stderr.strip().splitlines() or [f"mount ended with {done.returncode}"])[0]
        raise _Unmounted(re.sub(r"^mount: (\S+: )?(fsconfig\(\) failed: )?", "", first).rstrip("."))


def _mount_share(wanted: Declared, place: str) -> None:
    host, _, _ = wanted.source.rpartition(":/")
    options = dict.fromkeys(filter(None, wanted.options.split(",")))
    values = dict(one.partition("=")[::2] for one in options)
    address, own = _reach(host.strip("[]"), int(values.get("port") or NFS_PORT), values.get("proto", "tcp"))
    versions = [values[key] for key in ("vers", "nfsvers") if key in values] or list(_VERSIONS)
    refused = []
    for version in versions:
        said = [wanted.options, f"vers={version}", f"addr={address}", f"clientaddr={own}", _SHORT]
        said += [f"mountaddr={address}", "nolock"] if version.startswith("3") else []
        try:
            _mount(["-i", "-t", "nfs", "-o", ",".join(filter(None, said)), wanted.source, place])
        except _Unmounted as error:
            refused.append(str(error))
        else:
            return
        if re.search(r"no answer|timed out", refused[-1]):
            # One that does not answer one version answers none, and each would take its time.
            break
    raise _Unmounted("; ".join(dict.fromkeys(refused)))


def _reach(host: str, port: int, protocol: str) -> tuple[str, str]:
    """Return the server's address and our own towards it, as the kernel wants them; what does not listen is said."""
    kind = socket.SOCK_STREAM if protocol.startswith("tcp") else socket.SOCK_DGRAM
    problem = f"{host} has no address"
    try:
        addresses = socket.getaddrinfo(host, port, type=kind)
    except OSError as error:
        raise _Unmounted(f"{host} has no address: {error.strerror}") from None
    for family, _, _, _, target in addresses:
        with socket.socket(family, kind) as trial:
            trial.settimeout(CONNECT_SECONDS)
            try:
                trial.connect(target)
                return str(target[0]), str(trial.getsockname()[0])
            except OSError as error:
                why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
                problem = f"{host}, port {port} ({target[0]}): {why}"
    raise _Unmounted(problem)
