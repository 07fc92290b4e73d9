"""A systemd of the tests' own that starts engines by the real steps of their units.

Whatever is asked of it, it holds that no two engines ever run on one port, or on one GPU unless both know it divided in
the same way, and that a start outside a run of ours uses a release that was proved.
"""

from __future__ import annotations

import shutil
import subprocess

from gpuready.hardware import nvml
from gpuready.operations import devices, replica, start
from gpuready.outcome import Change, MachineCannot
from gpuready.serving.layout import Layout


class Server:
    """The server: its layout, its GPUs and what systemd does."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.gpus: list[str] = [f"GPU-{index}" for index in range(8)]
        self.active: dict[str, int] = {}
        self.enabled: set[str] = set()
        self.calls: list[str] = []
        self.cannot_stop: set[str] = set()
        self.starting: set[str] = set()
        self.journal = ""
        """What the last start of any unit wrote."""
        self.settle_seconds = 0.0
        self._pid = 1_000_000_000

    def probe(self) -> nvml.NvmlReport:
        return nvml.NvmlReport(gpus=tuple(nvml.NvmlGpu(index, uuid=uuid) for index, uuid in enumerate(self.gpus)))

    def place_unit(self, name: str, text: str, check: bool) -> Change | None:
        path = self.layout.engine_unit
        before = path.read_text() if path.exists() else ""
        if before == text:
            return None
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Change(name, before, text)

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.calls.append(" ".join(words))
        verb, unit = words[0], words[-1]
        code = 0
        if verb in ("stop", "restart") or "--now" in words:
            code = self._stop(unit)
        if verb == "enable":
            self.enabled.add(unit)
        if verb == "disable":
            self.enabled.discard(unit)
        if verb in ("start", "restart"):
            code = self._start(unit)
        return subprocess.CompletedProcess(words, code, "", "" if code == 0 else "Job failed")

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        known = {
            "ActiveState": "activating" if unit in self.starting else "active" if unit in self.active else "inactive",
            "UnitFileState": "enabled" if unit in self.enabled else "disabled",
            "MainPID": str(self.active.get(unit, 0)),
            "NRestarts": "0",
            "NeedDaemonReload": "no",
            "InvocationID": "",
            "InactiveExitTimestampMonotonic": "0",
            "SubState": "running" if unit in self.active else "dead",
        }
        return {name: known[name] for name in names}

    def _stop(self, unit: str) -> int:
        if unit in self.cannot_stop:
            return 1
        self.active.pop(unit, None)
        shutil.rmtree(self.layout.run(name_of(unit)), ignore_errors=True)
        return 0

    def _start(self, unit: str) -> int:
        name = name_of(unit)
        self.starting.discard(unit)
        try:
            devices.write_devices(self.layout, name)
        except MachineCannot:
            return 1
        started = start.running(self.layout, name)
        if "broken" in started.plan["flags"]:
            return 1
        for other in self.active:
            beside = start.running(self.layout, name_of(other))
            assert beside.part["port"] != started.part["port"], f"{name} meets {other} on a port"
            if not started.part.get("division") or started.part["division"] != beside.part.get("division"):
                assert not set(self.uuids(other)) & set(self.uuids(unit)), f"{name} meets {other} on a GPU"
        self._pid += 1
        self.active[unit] = self._pid
        replica.wait_ready(self.layout, name, self._pid)
        return 0

    def after(self, unit: str) -> set[str]:
        """Return the units of engines after which this one starts at boot."""
        path = self.layout.order(name_of(unit))
        lines = path.read_text().splitlines() if path.exists() else []
        return {one for line in lines if line.startswith("After=") for one in line.removeprefix("After=").split()}

    def uuids(self, unit: str) -> list[str]:
        return start.read_devices(self.layout, name_of(unit))["GPUREADY_GPU_UUIDS"].split(",")

    def reboot(self) -> None:
        """Boot: /run is empty, and what is enabled starts on the record."""
        self.active.clear()
        shutil.rmtree(self.layout.root / "run", ignore_errors=True)
        waiting = sorted(self.enabled)
        while waiting:
            unit = next(one for one in waiting if not self.after(one) & set(waiting))
            waiting.remove(unit)
            assert self._start(unit) == 0, f"{unit} is enabled and does not start at boot"

    def serving(self) -> dict[str, tuple[int, str]]:
        """Return the release and GPUs of every engine that runs."""
        return {
            name_of(unit): (
                start.running(self.layout, name_of(unit)).number,
                start.read_devices(self.layout, name_of(unit))["CUDA_VISIBLE_DEVICES"],
            )
            for unit in sorted(self.active)
        }


def name_of(unit: str) -> str:
    return unit.removeprefix("gpuready-engine@").removesuffix(".service")
