"""Writes one line per start and end of a task, so that the tests of interruption know where a run is.

A callback of the tests alone: they name it in ANSIBLE_CALLBACKS_ENABLED, and the file in GPUREADY_POINTS.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: points
type: notification
short_description: Writes starts and ends of tasks to the file named in GPUREADY_POINTS
"""

ON_THE_CONTROLLER = (
    "add_host", "assert", "debug", "fail", "group_by", "include_role", "include_tasks", "import_role", "import_tasks",
    "include_vars", "meta", "pause", "set_fact", "set_stats", "validate_argument_spec",
)  # fmt: skip
"""Actions that never ask the server."""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """One JSON object a line; a line is written in one step, so a reader never sees half of one."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "points"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._file = os.open(os.environ["GPUREADY_POINTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._play = ""

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play = play.get_name()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._write("start", host, task)

    def v2_runner_on_ok(self, result: Any) -> None:
        self._write("ok", result.host, result.task, changed=bool(result.result.get("changed")))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._write("failed", result.host, result.task)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._write("unreachable", result.host, result.task)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._write("skipped", result.host, result.task)

    def _write(self, event: str, host: Any, task: Any, **more: Any) -> None:
        action = str(task.action).rpartition(".")[2]
        line = {
            "event": event,
            "host": host.get_name(),
            "play": self._play,
            "task": task.get_name(),
            "action": action,
            "remote": action not in ON_THE_CONTROLLER and task.delegate_to is None,
            # Not the clock: the tests set that wrong on purpose.
            "at": time.clock_gettime(time.CLOCK_MONOTONIC_RAW),
            **more,
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())
