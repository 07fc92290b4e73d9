"""What the probe says of what serves: engines, models, replicas, the gateway, and real answers."""

from __future__ import annotations

import csv
import json
import pwd
import struct
import time
from pathlib import Path
from typing import Any

from tests.verify.probe.reading import (
    BUSY,
    ENGINE_USER,
    RUN,
    SILENT,
    STATE,
    ask,
    digest_of,
    files_digest,
    folder_files,
    last_line,
    listeners,
    pids_of,
    read_json,
    read_text,
    run,
    text_of,
    unit,
)  # fmt: skip

NOBODY = "nobody"
GATEWAY_RUN = Path("/run/gpuready-gateway")
GATEWAY_UNIT = "gpuready-gateway.service"
UNKNOWN_MODEL = "gpuready-verify/no-such-model"
SHOWN = 5
SANDBOX = (
    "User", "NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem", "ProtectHome", "ProtectControlGroups",
    "ProtectKernelModules", "ProtectKernelTunables", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID",
    "RestrictRealtime", "LockPersonality",
)  # fmt: skip


def engines(record: dict[str, Any]) -> dict[str, Any]:
    """Judge each engine's environment: is it whole, and does its Python run and have the engine."""
    return {one["folder"]: _engine(one) for one in record["plan"]["engines"]}


def _engine(planned: dict[str, Any]) -> dict[str, Any]:
    folder = Path(planned["folder"])
    lacking: list[str] = []
    distributions = list(folder.glob("lib/python3*/site-packages/*.dist-info"))
    for path in distributions:
        lacking += _lacking(path)
    names = f"{planned['engine']}".replace("_", "-")
    code = (
        "import sys; from importlib.metadata import distributions as d; "
        "print(*[x.version for x in d() if x.name.lower().replace('_', '-') in (sys.argv[1], sys.argv[1] + '-cpu')])"
    )
    said = run(f"{folder}/bin/python", "-I", "-B", "-c", code, names, user=ENGINE_USER)
    return {
        "marker": read_json(folder / "gpuready-engine.json"),
        "distributions": len(distributions),
        "lacking": lacking[:SHOWN],
        "lacking_count": len(lacking),
        "version": said.stdout.strip() if said.returncode == 0 else None,
        "said": last_line(said.stderr) or f"exit {said.returncode}",
    }


def _lacking(distribution: Path) -> list[str]:
    """Return the files of a distribution that are not there, or not as large as it recorded."""
    lacking = []
    try:
        with (distribution / "RECORD").open(encoding="utf-8", newline="") as file:
            for name, _, size in csv.reader(file):
                path = distribution.parent / name
                try:
                    found = path.stat().st_size
                except OSError:
                    lacking.append(f"{path} is missing")
                    continue
                # Some wheels bring compiled files, which are compiled anew when they are installed.
                if size and found != int(size) and not name.endswith(".pyc"):
                    lacking.append(f"{path} has {found} bytes instead of {size}")
    except (OSError, ValueError) as error:
        lacking.append(f"{distribution}/RECORD cannot be read ({error})")
    return lacking


def models(record: dict[str, Any]) -> dict[str, Any]:
    """Judge each model's folder: are its files whole, and what may the engines' user do with them."""
    return {
        one["path"]: {"broken": _broken(Path(one["path"]), one)[:SHOWN], **_rights(Path(one["path"]))}
        for one in record["plan"]["models"]
    }


def _broken(folder: Path, planned: dict[str, Any]) -> list[str]:
    if not folder.is_dir():
        return [f"{folder} is not there"]
    is_adapter = planned.get("kind") == "adapter"
    config = "adapter_config.json" if is_adapter else "config.json"
    broken = [] if isinstance(read_json(folder / config), dict) else [f"{folder}/{config} is not JSON or not there"]
    if not is_adapter and not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
    ):
        broken.append(f"{folder} has no tokenizer")
    index = read_json(folder / "model.safetensors.index.json")
    names = set(index["weight_map"].values()) if index else {path.name for path in folder.glob("*.safetensors")}
    if not names and not (planned.get("allow_pickle") and [*folder.glob("*.bin"), *folder.glob("*.pt*")]):
        broken.append(f"{folder} has no safetensors weights")
    return broken + [problem for name in sorted(names) if (problem := _shard_problem(folder / name))]


def _shard_problem(path: Path) -> str:
    """Say what is wrong with a file of weights: its header knows where its data ends."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length if length < size else 0))
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except (ValueError, struct.error):
        return f"{path} has no whole header"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    return "" if size == whole else f"{path} has {size} bytes instead of {whole}"


def _rights(folder: Path) -> dict[str, Any]:
    """Return what the engines' user cannot read, and what it could write; the kernel decides, asked with its rights."""
    code = (
        "import json, os, sys\n"
        "paths = [sys.argv[1], *(os.path.join(p, n) for p, ds, fs in os.walk(sys.argv[1]) for n in ds + fs)]\n"
        "closed = [p for p in paths if not os.access(p, os.R_OK)]\n"
        "print(json.dumps([closed[:5], [p for p in paths if os.access(p, os.W_OK)][:5]]))"
    )
    said = run("/usr/bin/python3", "-I", "-c", code, str(folder), user=ENGINE_USER)
    unreadable, writable = json.loads(last_line(said.stdout))
    return {"unreadable": unreadable, "writable": writable}


def replicas(record: dict[str, Any]) -> dict[str, Any]:
    """Return each replica's unit, release, process and sockets."""
    sockets = listeners()
    pairs = [(one, part) for one in record["plan"]["deployments"] for part in one["replicas"]]
    return {
        f"{one['name']}.{part['index']}": _replica(one["name"], part["index"], part["port"], sockets)
        for one, part in pairs
    }


def _replica(name: str, index: int, port: int, sockets: list[tuple[str, int, int]]) -> dict[str, Any]:
    replica = f"{name}.{index}"
    state = unit(f"gpuready-engine@{replica}.service", "After", *SANDBOX)
    link = STATE / "replicas" / name / str(index) / "current"
    number = link.readlink().name if link.is_symlink() else ""
    files = folder_files(STATE / "releases" / name / number) if number else None
    proof = json.loads((files or {}).pop("verified.json", "{}"))
    devices = dict(line.partition("=")[::2] for line in (read_text(RUN / replica / "devices.env") or "").splitlines())
    pids = pids_of(state.get("ControlGroup", ""))
    return {
        "unit": state,
        "recorded": number,
        "digest": files_digest(files)[:16] if files else None,
        "proved": str(index) in proof.get("replicas", {}),
        "started_on": devices.get("GPUREADY_RELEASE", ""),
        "ready": read_json(RUN / replica / "ready.json"),
        "on_trial": (RUN / ".trial" / replica).exists(),
        "unit_digest": (digest_of(Path("/etc/systemd/system/gpuready-engine@.service")) or "")[:16],
        "process": _process(state.get("MainPID", "0")),
        "listens": sorted({f"{address}:{at}" for address, at, pid in sockets if pid in pids}),
        "to_nobody": _connect(port, NOBODY),
    }


def _connect(port: int, user: str) -> str:
    """Return what comes of a connection on loopback with a user's rights: connected, or why not."""
    code = (
        "import socket, sys\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 3)\n"
        "except OSError as error: print(error.strerror or error)\n"
        "else: print('connected')"
    )
    said = run("/usr/bin/python3", "-I", "-c", code, str(port), user=user)
    return last_line(said.stdout) or last_line(said.stderr)


def _process(pid: str) -> dict[str, str]:
    """Return what the kernel says of a process: its user, and what it can never become."""
    status = read_text(Path("/proc") / pid / "status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    uid = fields.get("Uid", "").split()
    try:
        owner = pwd.getpwuid(int(uid[1])).pw_name if uid else ""
    except KeyError:
        owner = uid[1]
    return {
        "user": owner,
        "NoNewPrivs": fields.get("NoNewPrivs", "").strip(),
        "CapBnd": fields.get("CapBnd", "").strip(),
    }


def generations(record: dict[str, Any]) -> dict[str, Any]:
    """Ask every replica for a few tokens, then every deployment that answered through the gateway."""
    gateway = record["plan"]["gateway"]
    straight: dict[str, Any] = {}
    through: dict[str, Any] = {}
    for one in record["plan"]["deployments"]:
        for part in one["replicas"]:
            straight[f"{one['name']}.{part['index']}"] = ask_engine(part["port"], one["model"], task_of(one))
        # The gateway holds requests for an engine that is away; that is known already and need not be waited for.
        if any(straight[f"{one['name']}.{part['index']}"].get("tokens") for part in one["replicas"]):
            through[one["name"]] = generate(door(gateway), one["model"], task=task_of(one))
    return {"straight": straight, "through": through}


def task_of(deployment: dict[str, Any]) -> str:
    """Return what a deployment is asked for; plans of earlier versions have models that generate alone."""
    return str(deployment.get("task", "generate"))


def ask_engine(port: int, model: str, task: str = "generate") -> dict[str, Any]:
    """Ask one engine itself."""
    return generate(f"127.0.0.1:{port}", model, f"127.0.0.1:{port}", task)


def work_done(engine: str) -> str | None:
    """Return the engine's own counters of its work, as text; None where it does not tell them."""
    if not engine:
        return None
    text = text_of(f"http://{engine}/metrics")
    lines = [line for line in (text or "").splitlines() if line.startswith(("vllm:", "sglang:", "trtllm_"))]
    return "\n".join(lines) or None


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/completions", {"prompt": "Is this server well?", "max_tokens": 2, "temperature": 0}),
    "embed": ("/v1/embeddings", {"input": "Is this server well?"}),
    "rerank": ("/v1/rerank", {"query": "Is this server well?", "documents": ["It is.", "It is not."]}),
    "classify": ("/classify", {"input": "Is this server well?"}),
}


def came(task: str, reply: dict[str, Any]) -> int:
    """Return how much of what was asked for is in an answer: tokens, or rows of numbers."""
    if task == "generate":
        return int((reply.get("usage") or {}).get("completion_tokens", 0)) if reply.get("choices") else 0
    rows = reply.get("results" if task == "rerank" else "data") or []
    key = {"embed": "embedding", "rerank": "relevance_score", "classify": "probs"}[task]
    return sum(1 for row in rows if row.get(key) not in (None, []))


def generate(door: str, model: str, engine: str = "", task: str = "generate") -> dict[str, Any]:
    """Ask for two tokens, or for what else a model is made for; return the model that answered and how much came.

    Silence is that of a busy engine only where its own counters went on meanwhile.
    """
    path, question = ASKED[task]
    before = work_done(engine)
    began = time.monotonic()
    status, reply = ask(f"http://{door}{path}", {"model": model, **question})
    seconds = time.monotonic() - began
    if status != 200 or not isinstance(reply, dict):
        silent = status is None and reply == SILENT
        busy = status in BUSY or (silent and (not engine or work_done(engine) not in (None, before)))
        return {"said": reply if status is None else f"HTTP {status}", "busy": busy, "seconds": seconds}
    return {"model": reply.get("model"), "tokens": came(task, reply), "seconds": seconds}


def door(gateway: dict[str, Any]) -> str:
    """Return where this server reaches its own gateway."""
    bind = gateway["bind"]
    if bind in ("", "*", "0.0.0.0"):
        bind = "127.0.0.1"
    elif bind in ("::", "[::]"):
        bind = "::1"
    return f"[{bind}]:{gateway['port']}" if ":" in bind.strip("[]") else f"{bind}:{gateway['port']}"


def gateway(record: dict[str, Any]) -> dict[str, Any]:
    """Return the gateway's unit, files, sockets and answers."""
    planned = record["plan"]["gateway"]
    current = Path(planned["folder"]) / "current"
    state = unit(GATEWAY_UNIT, *SANDBOX)
    pids = pids_of(state.get("ControlGroup", ""))
    on_disk = folder_files(current)
    checked = run("haproxy", "-c", "-f", str(current / "haproxy.cfg"))
    listed = ask(f"http://{door(planned)}/v1/models")
    unknown = {"model": UNKNOWN_MODEL, "prompt": "x", "max_tokens": 1}
    return {
        "unit": state,
        "digest_is_name": bool(on_disk)
        and current.resolve().name.partition("-")[0] == files_digest(on_disk or {})[:12],
        "loaded_is_on_disk": on_disk is not None and folder_files(GATEWAY_RUN / "loaded") == on_disk,
        "unit_is_on_disk": digest_of(GATEWAY_RUN / "unit") == digest_of(Path("/etc/systemd/system") / GATEWAY_UNIT),
        "accepted": checked.returncode == 0,
        "said": next(
            (line.partition(" : ")[2] for line in checked.stderr.splitlines() if "[ALERT]" in line), "no word"
        ),
        "models": listed,
        "unknown_model": ask(f"http://{door(planned)}/v1/completions", unknown),
        "listens": sorted({f"{address}:{port}" for address, port, pid in listeners() if pid in pids}),
    }
