"""What an engine's process is given beside its words: environment, caches, and the NUMA node of its GPUs."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpuready.hardware import host
from gpuready.operations.start import Start, read_devices
from gpuready.serving.layout import Layout

ENVIRONMENT_FILE = "environment"
"""The file of a release with the engine's variables, `KEY=value`, one a line; lines that begin with # are reasons."""
_CACHE = "${CACHE_DIRECTORY}"
"""In a value: the replica's own folder that stays, as systemd names it."""
_ONCE_OURS = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
"""For releases made before their plan held these, too."""
# Numbers of the kernel's interface; neither Python nor libc has this call (linux/mempolicy.h, unistd of each).
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_BITS = 64


def environment(layout: Layout, replica: str, start: Start) -> dict[str, str]:
    """Return the environment of the engine: where its programs and caches are, the release's own, its devices."""
    plan, cache = start.plan, caches(layout, replica, start)
    cuda = plan.get("cuda_home")
    path = [f"{plan['engine_folder']}/bin", *([f"{cuda}/bin"] if cuda else []), "/usr/local/bin", "/usr/bin", "/bin"]
    own = {name: value.replace(_CACHE, str(layout.cache(replica))) for name, value in _of_release(start).items()}
    return {
        "PATH": ":".join(path),
        **({"CUDA_HOME": cuda} if cuda else {}),
        "HOME": str(cache),
        "XDG_CACHE_HOME": str(cache),
        "LANG": "C.UTF-8",
        **own,
        **read_devices(layout, replica),
    }


def _of_release(start: Start) -> dict[str, str]:
    """Return the variables of the release's file; from the plan where the release was made before there was one."""
    file = start.folder / ENVIRONMENT_FILE
    if not file.exists():
        known: Any = start.plan["environment"]
        if isinstance(known, Mapping):
            return {**_ONCE_OURS, **known}
        return {one["name"]: one["value"] for one in known}
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))


# ------------------------------------------------------------------------------------------------ caches


def caches(layout: Layout, replica: str, start: Start) -> Path:
    """Return the folder of what this engine of a replica keeps between starts."""
    return layout.cache(replica) / PurePosixPath(start.plan["engine_folder"]).name


def forget_gone_engines(layout: Layout, replica: str, start: Start) -> list[str]:
    """Remove what engines kept that are not installed any more; return their names."""
    folder, engines = layout.cache(replica), Path(start.plan["engine_folder"]).parent
    kept = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    gone = [entry for entry in kept if not (engines / entry.name).is_dir()]
    for entry in gone:
        shutil.rmtree(entry, ignore_errors=True)
    return sorted(entry.name for entry in gone)


# ------------------------------------------------------------------------------------------------ NUMA


def stay_near(replica: str, node: int | None) -> None:
    """Keep this process, and so the engine, on the CPUs of a NUMA node, and have it take memory there first."""
    cpus = next((one.cpus for one in host.numa_nodes() or () if one.number == node), ())
    if node is None or not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # Without it the engine is a little slower.
        print(f"{replica} is not kept on the CPUs of NUMA node {node}: {error}", flush=True)
    try:
        prefer_memory_of(node)
    except OSError as error:
        # Memory is then taken where the process runs, and that is there.
        print(f"{replica} cannot ask for memory of NUMA node {node}: {error}", flush=True)


def prefer_memory_of(node: int) -> None:
    """Have the kernel give this process, and what it becomes, memory of a NUMA node as long as that has some.

    Raises:
        OSError: when the kernel does not let us, or does not know how.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(0, f"the call of {platform.machine()} is not known")
    words = (ctypes.c_ulong * (node // _BITS + 1))()
    words[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told (man set_mempolicy, BUGS).
    if libc.syscall(number, _MPOL_PREFERRED, words, len(words) * _BITS + 1):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
