"""`gpuready deployment`: running deployments, and the steps of their units."""

from __future__ import annotations

import os

from gpuready.cli.verb import Call, Verb
from gpuready.operations import replica
from gpuready.outcome import Result
from gpuready.serving.layout import Layout
from gpuready.serving.releases import replicas_on_disk


def _devices(call: Call) -> Result:
    return replica.write_devices(Layout(), call.arguments[0])


def _run(call: Call) -> Result:
    replica.run_engine(Layout(), call.arguments[0])


def _ready(call: Call) -> Result:
    main_pid = os.environ.get("MAINPID", "")
    return replica.wait_ready(Layout(), call.arguments[0], int(main_pid) if main_pid.isdigit() else None)


def _status(_: Call) -> Result:
    layout = Layout()
    return replica.status(layout, sorted(replicas_on_disk(layout)))


VERBS = {
    "status": Verb("say what every replica does now", _status),
    "devices": Verb("step of the unit: name the replica's GPUs", _devices, arguments=["replica"]),
    "run": Verb("step of the unit: become the engine", _run, arguments=["replica"]),
    "ready": Verb("step of the unit: wait for one real token", _ready, arguments=["replica"]),
}
