"""Ready means one real token: the engine's port answers long before a model can."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gpuready.serving import probes
from gpuready.serving.probes import Asked, Probe

PAUSE_SECONDS = 0.5
REQUEST_SECONDS = 60
WRONG_ANSWERS = 3
"""So often in a row, and it is no chance."""
_NO_JSON = "not JSON compliant"
# An engine is on this server: a proxy that the environment names must not stand between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotReady(Exception):
    """The engine did not give a token; the message says what was seen last."""


class Rubbish(NotReady):
    """The engine answers, and what it says is no answer of the model; waiting does not help."""


def one_token(asked: Asked) -> str:
    """Ask an engine, or the gateway, for one token, or for what else its model is made for; return a token's text.

    Raises:
        NotReady: when there is no answer, or an answer without what was asked for.
    """
    reply = _put(asked, probes.one_token(asked.task))
    return str(reply["choices"][0].get("text", "")) if asked.task == "generate" else ""


def prove(asked: Asked) -> None:
    """Have an engine prove that it serves the model that it should, with answers that make sense.

    Raises:
        NotReady: when it does not answer yet.
        Rubbish: when it does, and wrongly.
    """
    if wrong := probes.names_another(asked, _get(asked, "/v1/models")):
        raise Rubbish(f"port {asked.port} serves {wrong}")
    for probe in probes.of(asked):
        reply = _put(asked, probe)
        if isinstance(reply, dict) and reply.get("model", asked.model) != asked.model:
            raise Rubbish(f"an answer of the model {reply['model']} instead of {asked.model}")


def _put(asked: Asked, probe: Probe) -> Any:
    try:
        reply = _get(asked, probe.path, {"model": asked.model, **probe.body})
    except NotReady as error:
        if "logprobs" not in probe.body or not _is_refusal(error):
            raise
        # Some settings leave no logprobs (max-logprobs 0, some ways to draft).
        body = {name: value for name, value in probe.body.items() if name != "logprobs"}
        reply = _get(asked, probe.path, {"model": asked.model, **body})
    if lacks := probe.lacks(reply):
        raise Rubbish(f"an answer without {lacks}: {json.dumps(reply)[:300]}")
    return reply


def _is_refusal(error: NotReady) -> bool:
    return isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code in (400, 422)


def _get(asked: Asked, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON of an answer; with a body it is a POST."""
    data = None if body is None else json.dumps(body).encode()
    url = f"http://{asked.address}:{asked.port}{path}"
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with _DIRECT.open(request, timeout=REQUEST_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        if _NO_JSON in said:
            # Logits that are no numbers make logprobs that JSON cannot hold, and the engine's server fails on them.
            raise Rubbish(f"HTTP {error.code}, its numbers are not finite: {said}") from error
        raise NotReady(f"HTTP {error.code}: {said}") from error
    except (OSError, ValueError, HTTPException) as error:
        raise NotReady(str(getattr(error, "reason", error))) from error


def wait_for_token(asked: Asked, main_pid: int | None, budget_seconds: float) -> float:
    """Wait until the engine gives a token, or what else it is asked for; return the seconds that it took.

    Raises:
        NotReady: when the engine's process ends or the budget is used up.
    """
    start = time.monotonic()
    seen, wrong = "nothing yet", 0
    while True:
        spent = time.monotonic() - start
        if main_pid is not None and not _alive(main_pid):
            raise NotReady(f"the engine ended after {spent:.0f} s, before its first token")
        if spent > budget_seconds:
            raise NotReady(f"no token within {budget_seconds:.0f} s; last seen: {seen}")
        try:
            prove(asked)
        except NotReady as error:
            seen = str(error)
            wrong = wrong + 1 if isinstance(error, Rubbish) else 0
            if wrong == WRONG_ANSWERS:
                raise NotReady(f"it answers wrongly, {WRONG_ANSWERS} times: {seen}") from error
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
