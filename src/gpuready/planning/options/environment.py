"""The environment of an engine's processes: loopback, offline, nothing reported, compiled code kept between starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuready.planning.options.entry import Entry, Served

CACHE = "${CACHE_DIRECTORY}"
"""The replica's own folder that stays, as systemd names it to a unit; whoever starts the engine puts the path in."""


def variables(served: Served) -> Iterator[Entry]:
    """Yield every variable that an engine of a deployment is started with."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        yield Entry(name, "1", "the model is on this server; nothing is fetched while it serves")
    yield Entry("DO_NOT_TRACK", "1", "nothing is reported to anyone")
    if served.engine == "vllm":
        yield Entry("VLLM_NO_USAGE_STATS", "1", "nothing is reported to anyone")
        yield Entry("VLLM_HOST_IP", "127.0.0.1", "its processes meet on loopback")
    yield Entry("GLOO_SOCKET_IFNAME", "lo", "its processes meet on loopback")
    yield Entry("NCCL_SOCKET_IFNAME", "lo", "its processes meet on loopback; all else of NCCL is left alone")
    yield from _caches(served)


def _caches(served: Served) -> Iterator[Entry]:
    """Yield where compiled code is kept: by the engine's version and lock, so that no other release reads it."""
    folder = f"{CACHE}/{PurePosixPath(served.place['engine_folder']).name}"
    why = "compiled code is kept between starts"
    names = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "CUDA_CACHE_PATH": "cuda",
    }
    if served.engine == "vllm":
        names["VLLM_CACHE_ROOT"] = "vllm"
    for name, part in names.items():
        yield Entry(name, f"{folder}/{part}", why)
