"""Ready means one real token: the engine's port answers long before a model can."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAUSE_SECONDS = 0.5
REQUEST_SECONDS = 60
# An engine is on this server: a proxy that the environment names must not stand between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotReady(Exception):
    """The engine did not give a token; the message says what was seen last."""


@dataclass(frozen=True)
class Asked:
    """Whom to ask, and for what."""

    port: int
    model: str
    task: str = "generate"
    address: str = "127.0.0.1"


def one_token(asked: Asked) -> str:
    """Ask an engine, or the gateway, for one token, or for what else its model is made for; return a token's text.

    Raises:
        NotReady: when there is no answer, or an answer without what was asked for.
    """
    path, question = _QUESTIONS[asked.task]
    body = json.dumps({"model": asked.model, **question}).encode()
    request = urllib.request.Request(
        f"http://{asked.address}:{asked.port}{path}", body, {"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(request, timeout=REQUEST_SECONDS) as answer:
            reply = json.load(answer)
    except urllib.error.HTTPError as error:
        raise NotReady(f"HTTP {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise NotReady(str(getattr(error, "reason", error))) from error
    if not _has_answer(asked.task, reply):
        raise NotReady(f"an answer without {_WANTED[asked.task]}: {json.dumps(reply)[:300]}")
    return str(reply["choices"][0].get("text", "")) if asked.task == "generate" else ""


_QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/completions", {"prompt": "Ready?", "max_tokens": 1, "temperature": 0}),
    "embed": ("/v1/embeddings", {"input": "Ready?"}),
    "rerank": ("/v1/rerank", {"query": "Ready?", "documents": ["It is ready."]}),
    "classify": ("/classify", {"input": "Ready?"}),
}
_WANTED = {"generate": "a token", "embed": "an embedding", "rerank": "a score", "classify": "probabilities"}


def _has_answer(task: str, reply: Any) -> bool:
    try:
        if task == "generate":
            return bool(reply["choices"]) and reply["usage"]["completion_tokens"] >= 1
        if task == "rerank":
            return isinstance(reply["results"][0]["relevance_score"], int | float)
        numbers = reply["data"][0]["embedding" if task == "embed" else "probs"]
        return bool(numbers) and all(isinstance(one, int | float) for one in numbers)
    except (KeyError, IndexError, TypeError):
        return False


def wait_for_token(asked: Asked, main_pid: int | None, budget_seconds: float) -> float:
    """Wait until the engine gives a token, or what else it is asked for; return the seconds that it took.

    Raises:
        NotReady: when the engine's process ends or the budget is used up.
    """
    start = time.monotonic()
    seen = "nothing yet"
    while True:
        spent = time.monotonic() - start
        if main_pid is not None and not _alive(main_pid):
            raise NotReady(f"the engine ended after {spent:.0f} s, before its first token")
        if spent > budget_seconds:
            raise NotReady(f"no token within {budget_seconds:.0f} s; last seen: {seen}")
        try:
            one_token(asked)
        except NotReady as error:
            seen = str(error)
            time.sleep(PAUSE_SECONDS)
        else:
            return time.monotonic() - start


def _alive(pid: int) -> bool:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[0] != "Z"


def _fields(path: Path) -> list[str]:
    """Return the fields of a file of /proc, after a program's name in brackets; empty when the process is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_start(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks, so that another one with its number is told apart."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else None


def process_tree(root_pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _fields(entry / "stat")):
            parent = int(fields[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root_pid]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, []))
    return sorted(found)


def resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of processes, in bytes; processes that are gone count nothing."""
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = (_fields(Path(f"/proc/{pid}/statm")) for pid in pids)
    return sum(int(fields[1]) * page for fields in sizes if fields)


def baseline(main_pid: int, port: int, model: str, seconds: float, unit_digest: str) -> dict[str, Any]:
    """Return what ready.json holds: the proof of a token and the memory at that moment."""
    pids = process_tree(main_pid)
    return {
        "model": model,
        "port": port,
        "main_pid": main_pid,
        "seconds_to_first_token": round(seconds, 1),
        "ready_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host_resident_bytes": resident_bytes(pids),
        "unit_digest": unit_digest,
    }
