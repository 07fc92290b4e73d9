"""Runs on the server and says what it is like now, as one line of JSON. Reads only, changes nothing.

It shares no code with gpuready: what gpuready believes about a server is what is to be checked. Python 3.10, standard
library. Each topic stands alone: one that cannot be read is `{"unknown": WHY}`, and a test then says so.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.verify.probe import caches, host, serving
from tests.verify.probe.reading import STATE, read_json

# Only what is asked about leaves the server: flags and environment may hold what is not for everybody.
TOLD = ("name", "model", "model_path", "engine", "replicas")
SCHEMAS = (1, 2, 3)

TOPICS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    # The slow ones first: they run side by side.
    serving.generations, caches.caches, serving.engines, serving.gateway, serving.replicas, host.packages,
    host.server_part, serving.models, host.cuda, host.user, host.files, host.parameters, host.memory, host.clock,
    host.firewall, host.gpus, host.failed_units, host.access, host.leftovers,
)  # fmt: skip


def answer_of(topic: Callable[[dict[str, Any]], Any], record: dict[str, Any]) -> Any:
    """Return what a topic says; a topic that cannot be read is unknown, never good."""
    try:
        return topic(record)
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}


def told(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the plan that may leave the server."""
    deployments = [{key: one[key] for key in TOLD} for one in plan["deployments"]]
    return {
        **{key: plan[key] for key in ("schema", "host", "engines", "models", "gateway")},
        "deployments": deployments,
    }


def snapshot() -> dict[str, Any]:
    """Return everything that the tests ask about."""
    if os.geteuid() != 0:
        return {"refused": f"the login is {pwd.getpwuid(os.geteuid()).pw_name} and could not become root"}
    path = STATE / "plan.json"
    plan = read_json(path)
    if not isinstance(plan, dict) or plan.get("schema") not in SCHEMAS:
        state = "is damaged, or of another version of gpuready" if path.exists() else "is not there"
        return {"refused": f"{path} {state}, so it is not a finished server"}
    record = {"plan": plan, "host": read_json(STATE / "host.json")}
    with ThreadPoolExecutor(max_workers=6) as pool:
        answers: Iterable[Any] = pool.map(lambda topic: answer_of(topic, record), TOPICS)
        topics = dict(zip((topic.__name__ for topic in TOPICS), answers))  # noqa: B905 - Python 3.10 reads it
    return {"plan": told(plan), "host": record["host"], "topics": topics}


def main() -> None:
    """Say it."""
    json.dump(snapshot(), sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
