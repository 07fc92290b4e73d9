"""Deployments brought to a plan, against a systemd of the tests' own that runs the real steps of the units."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin_systemd import Server, name_of

from gpuready.hardware import nvml
from gpuready.operations import beforehand, devices, engine_unit, memory, release, start, trial
from gpuready.operations.drain import Drain
from gpuready.operations.trial import Settings
from gpuready.outcome import Failed, MachineCannot
from gpuready.serving import last_words, readiness, releases, units
from gpuready.serving.files import read_json, write_text
from gpuready.serving.layout import Layout
from gpuready.serving.releases import Store

UNIT_TEXT = "[Service]\nExecStart=/bin/true\n"


class Killed(BaseException):
    """The run was ended by kill -9 here."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(Layout(tmp_path, engine_group="no-such-group"))
    monkeypatch.setattr(units, "systemctl", made.systemctl)
    monkeypatch.setattr(units, "properties", made.properties)
    monkeypatch.setattr(last_words, "of_unit", lambda unit, since: last_words.of_lines(["the engine's own words"]))
    monkeypatch.setattr(beforehand, "refusals", lambda layout, target: [])
    monkeypatch.setattr(trial, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(memory, "starts", lambda unit: iter([made.journal]))
    monkeypatch.setattr(memory, "kernel_log", lambda unit: "")
    monkeypatch.setattr(engine_unit, "place_unit", made.place_unit)
    monkeypatch.setattr(nvml, "probe", made.probe)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(devices, "load_uvm", lambda: None)
    monkeypatch.setattr(devices, "demand_files", lambda *_: None)
    monkeypatch.setattr(readiness, "wait_for_token", lambda *_: 1.0)
    monkeypatch.setattr(readiness, "process_tree", lambda pid: [pid])
    return made


def deployment(name: str, gpus: list[int], port: int, **flags: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": f"models/{name}",
        "environment": {},
        "engine_folder": "/opt/gpuready/engines/x",
        "flags": flags,
        "start_seconds": 1234,
        "replicas": [{"index": 0, "gpus": gpus, "port": port}],
    }


def apply(server: Server, *deployments: dict[str, Any], check: bool = False, unit: str = UNIT_TEXT) -> Any:
    files = {one["name"]: {"serve.yaml": json.dumps(one["flags"])} for one in deployments}
    settings = Settings(settle_seconds=server.settle_seconds)
    gateway = Drain(5, server.layout.root / "run/gpuready-gateway")
    return release.Applier(server.layout, check, settings, gateway).apply(
        {"deployments": list(deployments)}, files, unit
    )


def replicated(
    name: str, *places: tuple[list[int], int], more: dict[str, Any] | None = None, **flags: Any
) -> dict[str, Any]:
    """Return a deployment with a replica at each place: its GPUs and its port; `more` is what each has beside."""
    parts = [{"index": index, "gpus": gpus, "port": port, **(more or {})} for index, (gpus, port) in enumerate(places)]
    return {**deployment(name, [], 0, **flags), "replicas": parts}


CHAT = deployment("chat", [0], 18100)
CODE = deployment("code", [1], 18101)


def test_the_first_run_brings_all_and_the_second_has_nothing_to_do(server: Server) -> None:
    assert apply(server, CHAT, CODE).changed
    assert server.serving() == {"chat.0": (1, "0"), "code.0": (1, "1")}
    assert len(server.enabled) == 2
    server.calls.clear()
    again = apply(server, CHAT, CODE)
    assert (again.changed, again.summary) == (False, "every deployment is as planned and serves")
    assert server.calls == []


def test_an_engine_that_a_boot_is_starting_is_waited_for_and_not_started_again(server: Server) -> None:
    apply(server, CHAT)
    unit = units.unit_of("chat.0")
    server.reboot()
    server.systemctl("stop", unit)
    server.starting.add(unit)
    server.calls.clear()
    would = apply(server, CHAT, check=True)
    assert (would.changed, would.undecided) == (False, ["whether chat.0, which is starting, gives a token"])
    assert server.calls == []
    assert not apply(server, CHAT).changed
    assert server.calls == [f"start {unit}"]
    assert server.serving() == {"chat.0": (1, "0")}


def test_an_engine_that_is_starting_on_another_release_is_not_waited_for(server: Server) -> None:
    apply(server, CHAT)
    server.systemctl("stop", units.unit_of("chat.0"))
    server.starting.add(units.unit_of("chat.0"))
    server.calls.clear()
    assert apply(server, deployment("chat", [0], 18100, a=1)).changed
    assert f"start {units.unit_of('chat.0')}" not in server.calls
    assert server.serving() == {"chat.0": (2, "0")}


def test_only_the_replica_concerned_is_restarted(server: Server) -> None:
    apply(server, CHAT, CODE)
    server.calls.clear()
    apply(server, deployment("chat", [0], 18100, a=1), CODE)
    assert server.serving() == {"chat.0": (2, "0"), "code.0": (1, "1")}
    assert not [call for call in server.calls if "code" in call]


def test_a_release_without_a_token_is_taken_back(server: Server) -> None:
    apply(server, CHAT)
    with pytest.raises(
        Failed,
        match=r"serve release 2: it gave no token; it is now back on release 1, serving: .* the engine's own words; "
        r"its limit was 1234 s",
    ):
        apply(server, deployment("chat", [0], 18100, broken=1))
    assert server.serving() == {"chat.0": (1, "0")}
    server.reboot()
    assert server.serving() == {"chat.0": (1, "0")}


def test_without_a_proved_release_nothing_is_left_for_the_next_boot(server: Server) -> None:
    with pytest.raises(Failed, match="stopped and will not start at boot: there is no verified release"):
        apply(server, deployment("chat", [0], 18100, broken=1))
    assert server.serving() == {}
    assert server.enabled == set()
    assert not server.layout.current("chat", 0).is_symlink()


def test_a_proved_release_that_fails_today_stays_in_the_record(server: Server) -> None:
    apply(server, CHAT)
    server.gpus.clear()
    server.systemctl("stop", units.unit_of("chat.0"))
    with pytest.raises(
        Failed, match="it is now not serving; release 1 gave a token before, so systemd keeps trying it"
    ):
        apply(server, CHAT)
    server.gpus = [f"GPU-{index}" for index in range(8)]
    server.reboot()
    assert server.serving() == {"chat.0": (1, "0")}


def test_the_way_back_is_found_when_the_link_was_left_on_an_unproved_release(server: Server) -> None:
    # What a run leaves that is killed between the link and the restart.
    apply(server, CHAT)
    broken = deployment("chat", [0], 18100, broken=1)
    store = Store(server.layout, "chat")
    with pytest.raises(Failed):
        apply(server, broken)
    store.point(0, 2)
    with pytest.raises(Failed, match="serve release 2: it gave no token; it is now back on release 1, serving"):
        apply(server, broken)
    assert (store.current(0), server.serving()) == (1, {"chat.0": (1, "0")})


def test_a_link_that_moved_without_a_restart_is_not_taken_for_serving(server: Server) -> None:
    apply(server, CHAT)
    wanted = deployment("chat", [0], 18100, a=1)
    store = Store(server.layout, "chat")
    plan = json.dumps(wanted, indent=2, sort_keys=True) + "\n"
    store.point(0, store.add({"serve.yaml": json.dumps(wanted["flags"]), "plan.json": plan}))
    assert apply(server, wanted, check=True).summary == "chat.0: was not serving release 2, would be restarted"
    apply(server, wanted)
    assert server.serving() == {"chat.0": (2, "0")}
    assert store.verified(2)


def test_proof_that_was_not_recorded_is_recorded_without_a_restart(server: Server) -> None:
    apply(server, CHAT)
    (server.layout.releases("chat") / "1/verified.json").unlink()
    before = dict(server.active)
    assert "serves release 1, recorded" in apply(server, CHAT).summary
    assert server.active == before
    assert not apply(server, CHAT).changed


def test_a_release_edited_by_hand_is_not_what_was_proved(server: Server) -> None:
    apply(server, CHAT)
    path = server.layout.releases("chat") / "1/serve.yaml"
    path.write_text("edited")
    server.systemctl("restart", units.unit_of("chat.0"))
    path.write_text(json.dumps(CHAT["flags"]))
    assert "was not serving release 1, restarted" in apply(server, CHAT).summary


# Several replicas of one deployment ------------------------------------------------------------------------------

TWO = (([0], 18100), ([1], 18101))


def engine_calls(server: Server) -> list[str]:
    return [call for call in server.calls if call.split()[0] in ("start", "restart", "stop", "disable")]


def test_replicas_of_one_deployment_share_a_release_and_have_their_own_gpus(server: Server) -> None:
    apply(server, replicated("chat", *TWO))
    assert server.serving() == {"chat.0": (1, "0"), "chat.1": (1, "1")}
    assert Store(server.layout, "chat").numbers() == [1]
    assert not apply(server, replicated("chat", *TWO)).changed
    server.reboot()
    assert server.serving() == {"chat.0": (1, "0"), "chat.1": (1, "1")}


def test_replicas_are_restarted_one_after_the_other(server: Server) -> None:
    apply(server, replicated("chat", *TWO))
    server.calls.clear()
    apply(server, replicated("chat", *TWO, a=1))
    assert engine_calls(server) == [f"restart {units.unit_of(name)}" for name in ("chat.0", "chat.1")]
    assert server.serving() == {"chat.0": (2, "0"), "chat.1": (2, "1")}


def test_while_one_replica_fails_the_other_serves_on(server: Server) -> None:
    apply(server, replicated("chat", *TWO))
    server.calls.clear()
    with pytest.raises(
        Failed, match=r"chat\.0 did not serve release 2: it gave no token; it is now back on release 1, serving"
    ):
        apply(server, replicated("chat", *TWO, broken=1))
    assert not [call for call in server.calls if "chat.1" in call]
    assert server.serving() == {"chat.0": (1, "0"), "chat.1": (1, "1")}


def test_a_replica_too_many_serves_until_the_others_are_new(server: Server) -> None:
    apply(server, replicated("chat", *TWO))
    server.calls.clear()
    apply(server, replicated("chat", TWO[0], a=1))
    assert engine_calls(server) == [f"restart {units.unit_of('chat.0')}", f"disable --now {units.unit_of('chat.1')}"]
    assert server.serving() == {"chat.0": (2, "0")}


def test_a_replica_too_many_goes_first_where_its_gpu_is_needed(server: Server) -> None:
    apply(server, replicated("chat", *TWO))
    apply(server, replicated("chat", ([0, 1], 18100)))
    assert server.serving() == {"chat.0": (2, "0,1")}


# Killed at any point ---------------------------------------------------------------------------------------------


@pytest.fixture
def killer(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """End the run just before the n-th step that it takes."""
    state = {"left": -1}

    def count() -> None:
        state["left"] -= 1
        if state["left"] == 0:
            raise Killed

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any, **named: Any) -> Any:
            count()
            return real(*words, **named)

        return step

    def arm(step: int) -> None:
        state["left"] = step

    monkeypatch.setattr(units, "systemctl", wrap(server.systemctl))
    for name in ("point", "unpoint", "mark_verified", "add"):
        monkeypatch.setattr(Store, name, wrap(getattr(Store, name)))
    for name in ("begin_trial", "end_trial"):
        monkeypatch.setattr(releases, name, wrap(getattr(releases, name)))
    yield arm
    arm(-1)


def forget_the_run(server: Server) -> None:
    """The process of the run is gone: its trials count no more."""
    for path in server.layout.trial("x").parent.glob("*"):
        write_text(path, json.dumps({**(read_json(path) or {}), "pid_start": "another"}))


BEFORE = [CHAT, CODE]
CHANGES = {
    "new release": [deployment("chat", [0], 18100, a=1), CODE],
    "exchange": [deployment("chat", [1], 18101), deployment("code", [0], 18100)],
    "extension": [deployment("chat", [0, 1], 18100), deployment("code", [2], 18101)],
    "removal and growth": [deployment("chat", [0, 1], 18101)],
    "one GPU for two": [
        replicated("chat", ([0], 18100), more={"shared_gib": 20.0, "start_after": ["code.0"]}),
        replicated("code", ([0], 18101), more={"shared_gib": 50.0}),
    ],
    "a second replica": [replicated("chat", ([0], 18100), ([2], 18102)), CODE],
}


@pytest.mark.parametrize("then", ["run", "crash", "boot"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_killed_anywhere_is_finished_by_the_next(
    server: Server, killer: Callable[[int], None], change: str, then: str
) -> None:
    wanted = CHANGES[change]
    for step in range(1, 200):
        for path in server.layout.root.iterdir():
            shutil.rmtree(path)
        server.active.clear()
        server.enabled.clear()
        apply(server, *BEFORE)
        killer(step)
        try:
            apply(server, *wanted)
        except Killed:
            killer(-1)
        else:
            killer(-1)
            break
        forget_the_run(server)
        if then == "boot":
            server.reboot()
        if then == "crash":
            for unit in list(server.active):
                server.systemctl("restart", unit)
        for unit in server.active:
            started = start.running(server.layout, name_of(unit))
            assert then == "run" or started.store.verified(started.number)
        apply(server, *wanted)
        expected = {
            f"{one['name']}.{part['index']}": ",".join(map(str, part["gpus"]))
            for one in wanted
            for part in one["replicas"]
        }
        assert {name: gpus for name, (_, gpus) in server.serving().items()} == expected
        assert server.enabled == {units.unit_of(name) for name in expected}
        assert not apply(server, *wanted).changed
        server.reboot()
        assert set(server.serving()) == set(expected)
    assert step > 8


# GPUs and ports that change hands --------------------------------------------------------------------------------


def test_only_who_holds_what_another_needs_is_stopped_first(server: Server) -> None:
    other = deployment("other", [5], 18105)
    apply(server, CHAT, CODE, other)
    server.calls.clear()
    wanted = [deployment("chat", [0, 1], 18100), deployment("code", [2], 18101), other]
    words = apply(server, *wanted, check=True)
    assert "code.0: would be stopped first, because chat.0 takes its GPU 1" in words.summary
    assert server.calls == []
    assert "code.0: stopped first, because chat.0 takes its GPU 1" in apply(server, *wanted).summary
    assert server.calls[0] == f"stop {units.unit_of('code.0')}"
    assert not [call for call in server.calls if "other" in call]
    assert server.serving() == {"chat.0": (2, "0,1"), "code.0": (2, "2"), "other.0": (1, "5")}


def test_two_exchange_gpus_and_ports(server: Server) -> None:
    apply(server, CHAT, CODE)
    said = apply(server, *CHANGES["exchange"]).summary
    assert "chat.0: stopped first, because code.0 takes its GPU 0 and its port 18100" in said
    assert server.serving() == {"chat.0": (2, "1"), "code.0": (2, "0")}


def test_who_made_room_in_vain_serves_again(server: Server) -> None:
    apply(server, CHAT, CODE)
    with pytest.raises(Failed) as failed:
        apply(server, deployment("chat", [1], 18101, broken=1), deployment("code", [0], 18100))
    assert "chat.0 did not serve release 2: it gave no token; it is now back on release 1, serving" in str(failed.value)
    assert "code.0, stopped to make room, serves release 1 again." in str(failed.value)
    assert server.serving() == {"chat.0": (1, "0"), "code.0": (1, "1")}


def test_who_fails_after_its_place_was_taken_does_not_come_back_on_it(server: Server) -> None:
    apply(server, CHAT, CODE)
    with pytest.raises(Failed, match=r"code\.0 did not serve release 2: it gave no token; it is now stopped"):
        apply(server, deployment("chat", [1], 18101), deployment("code", [0], 18100, broken=1))
    assert server.serving() == {"chat.0": (2, "1")}
    server.reboot()
    assert server.serving() == {"chat.0": (2, "1")}


# GPUs by UUID ----------------------------------------------------------------------------------------------------


def test_the_proof_records_uuids_and_later_starts_follow_them(server: Server) -> None:
    apply(server, deployment("chat", [3, 4], 18100))
    assert Store(server.layout, "chat").gpu_uuids(1, 0) == ["GPU-3", "GPU-4"]
    del server.gpus[1]
    server.reboot()
    assert server.serving() == {"chat.0": (1, "2,3")}
    assert server.uuids(units.unit_of("chat.0")) == ["GPU-3", "GPU-4"]


def test_a_start_is_refused_when_its_gpu_is_gone(server: Server) -> None:
    apply(server, deployment("chat", [3], 18100))
    server.gpus[3] = "GPU-new"
    with pytest.raises(MachineCannot, match=r"chat\.0 was proved on GPU GPU-3, which does not answer: answering are"):
        devices.write_devices(server.layout, "chat.0")


def test_a_run_takes_the_planned_gpu_after_one_was_replaced(server: Server) -> None:
    apply(server, deployment("chat", [3], 18100))
    server.gpus[3] = "GPU-new"
    apply(server, deployment("chat", [3], 18100))
    assert server.uuids(units.unit_of("chat.0")) == ["GPU-new"]
    assert Store(server.layout, "chat").gpu_uuids(1, 0) == ["GPU-new"]
    server.reboot()
    assert server.uuids(units.unit_of("chat.0")) == ["GPU-new"]


def test_gpus_that_shifted_are_given_out_as_planned_without_two_on_one(server: Server) -> None:
    apply(server, deployment("chat", [3], 18100))
    del server.gpus[1]
    server.reboot()
    # Planned with seven GPUs: index 2 is now the card that chat was proved on.
    apply(server, deployment("code", [2], 18101), deployment("chat", [3], 18100))
    assert server.uuids(units.unit_of("code.0")) == ["GPU-3"]
    assert server.uuids(units.unit_of("chat.0")) == ["GPU-4"]
    assert not apply(server, deployment("code", [2], 18101), deployment("chat", [3], 18100)).changed


# What is no longer declared, or stands otherwise than it should --------------------------------------------------


def test_what_is_no_longer_declared_is_stopped(server: Server) -> None:
    apply(server, CHAT, CODE)
    assert "code.0 is no longer declared: would be stopped" in apply(server, CHAT, check=True).summary
    assert "code.0" in server.serving()
    apply(server, CHAT)
    assert server.serving() == {"chat.0": (1, "0")}
    assert Store(server.layout, "code").current(0) is None
    assert Store(server.layout, "code").numbers() == [1]


def test_what_does_not_stop_keeps_its_link(server: Server) -> None:
    apply(server, CHAT, CODE)
    server.cannot_stop.add(units.unit_of("code.0"))
    with pytest.raises(Failed, match=r"code\.0\.service could not be stopped and is active"):
        apply(server, CHAT)
    assert Store(server.layout, "code").current(0) == 1


def test_a_disabled_unit_that_serves_is_only_enabled(server: Server) -> None:
    apply(server, CHAT)
    server.enabled.clear()
    before = dict(server.active)
    assert "would be enabled" in apply(server, CHAT, check=True).summary
    assert server.enabled == set()
    assert "chat.0: enabled, it serves already" in apply(server, CHAT).summary
    assert server.active == before
    assert server.enabled == {units.unit_of("chat.0")}


def test_check_mode_says_whom_a_changed_unit_restarts(server: Server) -> None:
    apply(server, CHAT, CODE)
    server.systemctl("stop", units.unit_of("code.0"))
    said = apply(server, CHAT, CODE, check=True, unit=UNIT_TEXT + "# new\n").summary
    assert "chat.0: its unit changed, would be restarted" in said
    assert "code.0: was not serving release 1, would be started" in said
    apply(server, CHAT, CODE)
    said = apply(server, CHAT, CODE, unit=UNIT_TEXT + "# new\n").summary
    assert "chat.0: its unit changed, restarted" in said


def test_modes_are_exact_whatever_the_umask_and_corrected_where_they_were_looser(
    server: Server, umask: Callable[[int], None]
) -> None:
    umask(0o077)
    apply(server, CHAT)
    state = server.layout.state

    def modes() -> dict[str, str]:
        paths = sorted(path for path in state.rglob("*") if not path.is_symlink())
        return {str(path.relative_to(state)): f"{path.stat().st_mode & 0o777:o}" for path in paths}

    wanted = {
        "plan.json": "640",
        "releases": "755",
        "releases/chat": "755",
        "releases/chat/1": "750",
        "releases/chat/1/plan.json": "640",
        "releases/chat/1/serve.yaml": "640",
        "releases/chat/1/verified.json": "640",
        "replicas": "755",
        "replicas/chat": "755",
        "replicas/chat/0": "755",
    }
    assert modes() == wanted
    assert f"{server.layout.run('chat.0').stat().st_mode & 0o777:o}" == "755"
    assert f"{(server.layout.run('chat.0') / 'devices.env').stat().st_mode & 0o777:o}" == "644"
    for name in ("releases/chat/1/serve.yaml", "plan.json"):
        (state / name).chmod(0o644)
    (state / "releases/chat/1").chmod(0o755)
    (state / "replicas/chat").chmod(0o700)
    assert "access to 4 files would be corrected" in apply(server, CHAT, check=True).summary
    assert "access to 4 files corrected" in apply(server, CHAT).summary
    assert modes() == wanted
    assert not apply(server, CHAT).changed


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    former = os.umask(0o022)
    yield lambda mask: void(os.umask(mask))
    os.umask(former)


def void(_: object) -> None:
    return None
