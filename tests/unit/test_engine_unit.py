"""The engines' unit: what it shuts, what it leaves open on purpose, and that no list of devices locks a GPU out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from gpuready.operations import crashes, devices, engine_unit
from gpuready.operations.machine import Done
from gpuready.outcome import Change, Refusal
from gpuready.serving import units
from gpuready.serving.layout import Layout

ROLE = Path(__file__).resolve().parents[2] / "roles/serving"
KNOBS: dict[str, Any] = yaml.safe_load((ROLE / "defaults/main.yml").read_text())


def rendered(**knobs: Any) -> str:
    """Return the unit as the role renders it."""
    text = (ROLE / "templates/gpuready-engine@.service.j2").read_text()
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701
    return environment.from_string(text).render({**KNOBS, **knobs})


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_every_setting_stands_on_a_line_of_its_own() -> None:
    for text in (rendered(), rendered(serving_restrict_devices=False, serving_reachable=["192.0.2.0/24", "::1"])):
        assert "{" not in text.replace("${", "")
        assert settings(text)["KillMode"] == ["mixed"]
        assert settings(text)["WantedBy"] == ["multi-user.target"]


def test_the_limits_of_a_crash_loop_are_the_roles() -> None:
    (step,) = settings(rendered(serving_crash_starts=3, serving_crash_seconds=900))["ExecStartPre"]
    assert step.endswith("deployment devices %i --starts 3 --seconds 900")
    assert KNOBS["serving_crash_starts"] == crashes.USUAL.starts
    assert KNOBS["serving_crash_seconds"] == crashes.USUAL.seconds
    assert settings(rendered())["RestartPreventExitStatus"] == [str(crashes.GIVEN_UP_STATUS)]


def test_the_clocks_protection_goes_with_the_list_of_devices() -> None:
    """ProtectClock= allows one device, and a unit that allows one and has no policy shuts all others out."""
    shut, opened = settings(rendered()), settings(rendered(serving_restrict_devices=False))
    assert shut["DevicePolicy"] == ["closed"]
    assert "ProtectClock" in shut
    assert not {"DevicePolicy", "DeviceAllow", "ProtectClock", "PrivateDevices"} & opened.keys()


def test_what_cuda_and_compilers_need_is_open() -> None:
    known = settings(rendered())
    for shuts_too_much in ("MemoryDenyWriteExecute", "PrivateNetwork", "PrivateUsers", "PrivateDevices", "ProcSubset"):
        assert shuts_too_much not in known
    assert "AF_NETLINK" in known["RestrictAddressFamilies"][0].split()
    assert {"/tmp", "/var/cache/gpuready/%i"} < set(known["ExecPaths"][0].split())
    assert not any("@resources" in line for line in known["SystemCallFilter"])


def test_engines_reach_this_server_alone_unless_more_is_declared() -> None:
    assert settings(rendered())["IPAddressAllow"] == ["localhost"]
    assert settings(rendered(serving_reachable=["192.0.2.7"]))["IPAddressAllow"] == ["localhost 192.0.2.7"]
    assert settings(rendered())["IPAddressDeny"] == ["any"]


@pytest.mark.parametrize("restricted", [True, False])
def test_systemd_calls_the_unit_safe(restricted: bool, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    path = tmp_path / "gpuready-engine@.service"
    path.write_text(rendered(serving_restrict_devices=restricted))
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    if not (found := re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)):
        pytest.skip(f"this systemd-analyze does not judge files: {said.stderr.strip()[:200]}")
    assert float(found[1]) <= 3.5


# ------------------------------------------------------------------------------------------------ locked out

POLICY = "[Service]\nDevicePolicy=closed\nDeviceAllow=char-nvidia* rw\nProtectClock=true\n"
GPU = Path(os.devnull)
"""Stands for a GPU's device file: a device that everybody may open."""


class Tried:
    """Programs that are played; `said` is what opening the files under the policy tells."""

    def __init__(self, said: str = "", code: int = 0) -> None:
        self.said, self.code = said, code
        self.words: list[str] = []

    def __call__(self, words: Sequence[str]) -> Done:
        self.words = list(words)
        return Done(self.code, self.said, "Failed to start transient service unit" if self.code else "")


def test_a_list_of_devices_is_tried_as_it_is() -> None:
    tried = Tried()
    engine_unit.refuse_lock_out(POLICY, lambda: [GPU], tried)
    assert "--property=DevicePolicy=closed" in tried.words
    assert "--property=DeviceAllow=char-nvidia* rw" in tried.words
    assert tried.words[-1] == str(GPU)


def test_a_list_that_locks_a_gpu_out_is_refused() -> None:
    with pytest.raises(Refusal, match=rf"engines could not open {GPU}: .*set serving_restrict_devices: false; nothing"):
        engine_unit.refuse_lock_out(POLICY, lambda: [GPU], Tried(f"1 {GPU}\n"))


def test_a_driver_that_is_away_is_not_the_lists_fault() -> None:
    engine_unit.refuse_lock_out(POLICY, lambda: [GPU], Tried(f"6 {GPU}\n"))


def test_what_cannot_be_tried_is_refused_and_not_taken_for_good() -> None:
    with pytest.raises(Refusal, match=r"cannot be tried: Failed to start transient service unit; nothing was changed"):
        engine_unit.refuse_lock_out(POLICY, lambda: [GPU], Tried(code=1))


@pytest.mark.parametrize(("text", "files"), [("[Service]\n", [GPU]), (POLICY, [])])
def test_nothing_is_tried_without_a_policy_or_without_gpus(text: str, files: list[Path]) -> None:
    tried = Tried()
    engine_unit.refuse_lock_out(text, lambda: files, tried)
    assert tried.words == []


def test_the_program_that_tries_says_what_it_could_not_open(tmp_path: Path) -> None:
    missing = tmp_path / "nvidia0"
    words = ["/usr/bin/env", "python3", "-I", "-c", engine_unit._OPEN, os.devnull, str(missing)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == f"2 {missing}\n"


class Placing:
    """systemd and the folder of units, as far as placing them goes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.did: list[str] = []

    def place_unit(self, name: str, text: str, check: bool) -> Change | None:
        path = self.layout.engine_unit.with_name(name)
        before = path.read_text() if path.exists() else ""
        if before == text:
            return None
        self.did.append(f"place {name}{' (check)' if check else ''}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Change(str(path), before, text)

    def systemctl(self, *words: str) -> None:
        self.did.append(" ".join(words))

    def refuse_lock_out(self, _: str) -> None:
        self.did.append("try")


@pytest.fixture
def placing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placing:
    made = Placing(Layout(tmp_path))
    monkeypatch.setattr(engine_unit, "place_unit", made.place_unit)
    monkeypatch.setattr(engine_unit, "refuse_lock_out", made.refuse_lock_out)
    monkeypatch.setattr(units, "systemctl", made.systemctl)
    return made


def test_modules_are_loaded_and_devices_tried_before_the_unit_is_placed(placing: Placing) -> None:
    wanted = (placing.layout, POLICY, {"gpuready-gpus.service": "[Service]\n"})
    assert len(engine_unit.place(*wanted, check=True)) == 2
    assert placing.did == ["place gpuready-gpus.service (check)", "try", "place gpuready-engine@.service (check)"]
    placing.did.clear()
    assert len(engine_unit.place(*wanted, check=False)) == 2
    loaded = "start gpuready-gpus.service"
    assert placing.did == ["place gpuready-gpus.service", loaded, "try", "place gpuready-engine@.service"]
    placing.did.clear()
    assert engine_unit.place(*wanted, check=False) == []
    assert placing.did == []


def test_a_unit_that_locks_out_leaves_the_former_one(placing: Placing, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_unit.place(placing.layout, "[Service]\n", {}, check=False)
    monkeypatch.setattr(engine_unit, "refuse_lock_out", lambda text: _refuse(text))
    with pytest.raises(Refusal):
        engine_unit.place(placing.layout, POLICY, {}, check=False)
    assert placing.layout.engine_unit.read_text() == "[Service]\n"


def _refuse(text: str) -> None:
    engine_unit_refuse(text, lambda: [GPU], Tried(f"13 {GPU}\n"))


engine_unit_refuse = engine_unit.refuse_lock_out


def test_the_step_before_all_units_loads_what_cuda_needs() -> None:
    text = (ROLE / "templates/gpuready-gpus.service.j2").read_text()
    assert settings(text)["ExecStart"] == ["/opt/gpuready/gpuready.pyz deployment gpus"]
    wanted = settings(rendered())
    assert "gpuready-gpus.service" in wanted["Wants"][0].split()
    assert "gpuready-gpus.service" in wanted["After"][0].split()


def test_a_server_without_nvidia_modprobe_leaves_it_to_the_modules_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "not installed" in devices.load_uvm().summary
