"""`gpuready deployment`: running deployments, and the steps of their units."""

from __future__ import annotations

import os

from gpuready.cli.verb import Call, Option, Verb, whole
from gpuready.operations import crashes, devices, replica
from gpuready.outcome import Result
from gpuready.serving.layout import Layout
from gpuready.serving.releases import replicas_on_disk


def _gpus(_: Call) -> Result:
    return devices.load_uvm()


def _devices(call: Call) -> Result:
    limit = crashes.Limit(call.options["starts"], call.options["seconds"])
    return devices.write_devices(Layout(), call.arguments[0], limit)


def _run(call: Call) -> Result:
    replica.run_engine(Layout(), call.arguments[0])


def _ready(call: Call) -> Result:
    main_pid = os.environ.get("MAINPID", "")
    return replica.wait_ready(Layout(), call.arguments[0], int(main_pid) if main_pid.isdigit() else None)


def _ended(call: Call) -> Result:
    result, invocation = (os.environ.get(name, "") for name in ("SERVICE_RESULT", "INVOCATION_ID"))
    return crashes.note_end(Layout(), call.arguments[0], result, invocation)


def _status(_: Call) -> Result:
    layout = Layout()
    return replica.status(layout, sorted(replicas_on_disk(layout)))


_LIMITS = [
    Option("starts", "starts without a token after which the unit fails", "N", whole(1, 1000), crashes.USUAL.starts),
    Option("seconds", "within which they count", "N", whole(1, 31_536_000), crashes.USUAL.seconds),
]

VERBS = {
    "status": Verb("say what every replica does now", _status),
    "gpus": Verb("step before all units: have CUDA's unified memory there", _gpus),
    "devices": Verb("step of the unit: name the replica's GPUs", _devices, arguments=["replica"], options=_LIMITS),
    "run": Verb("step of the unit: become the engine", _run, arguments=["replica"]),
    "ready": Verb("step of the unit: wait for one real token", _ready, arguments=["replica"]),
    "ended": Verb("step of the unit: take down how a start ended", _ended, arguments=["replica"]),
}
