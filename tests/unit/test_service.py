"""One daemon's files and unit, in a folder, with systemd and HAProxy's master played."""

from __future__ import annotations

import shutil
import stat
import subprocess
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import firewall, gateway, service
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Failed, Refusal
from gpuready.serving import units
from gpuready.serving.files import link
from gpuready.serving.probes import Asked
from gpuready.serving.readiness import NotReady

UNIT = "gpuready-gateway.service"


def done(code: int = 0, out: str = "", err: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, out, err)


@dataclass
class Server:
    """systemd, the daemon's check and its master, as far as a service needs them."""

    root: Path
    active: bool = False
    enabled: bool = False
    unread: bool = False
    """The unit file on disk is not the one that systemd read."""
    binds: bool = True
    """A new worker can start."""
    verify_says: str = ""
    check_says: str = ""
    calls: list[str] = field(default_factory=list)
    reloads: int = 0
    worker: int = 100
    running: dict[str, str] | None = None

    @property
    def runtime(self) -> Path:
        return self.root / "run"

    @property
    def current(self) -> Path:
        return self.root / "etc/current"

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.calls.append(words[0])
        if words[0] == "daemon-reload":
            self.unread = False
        if words[0] == "enable":
            self.enabled = True
        if words[0] in ("start", "restart"):
            self.start()
        if words[0] == "reload":
            shutil.rmtree(self.runtime / "loaded", ignore_errors=True)
            self.reloads += 1
            if self.binds:
                self.worker += 1
                self.running = service.content(self.current)
        return done()

    def start(self) -> None:
        """Do what the unit does; systemd gives it an empty runtime folder."""
        shutil.rmtree(self.runtime, ignore_errors=True)
        self.active, self.running = True, service.content(self.current)
        shutil.copytree(self.current.resolve(), self.runtime / "loaded")
        (self.runtime / "unit").write_text((self.root / "systemd" / UNIT).read_text())

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        return {
            "ActiveState": "active" if self.active else "inactive",
            "UnitFileState": "enabled" if self.enabled else "disabled",
            "NeedDaemonReload": "yes" if self.unread else "no",
        }

    def run(self, argv: list[str]) -> Done:
        if argv[0] == "systemd-analyze":
            assert not any(word.startswith("--recursive-errors") for word in argv), "systemd 249 does not know it"
            return Done(0, "", self.verify_says.replace("PATH", argv[-1]))
        if argv[0] == "haproxy":
            return Done(1, "", self.check_says) if self.check_says else Done(0, "", "")
        return Done(0, "noise\n[ALERT]    (316) : cannot bind socket for [192.0.2.1:8090].\n", "")

    def workers(self, runtime: Path) -> service.Workers:
        return service.Workers(self.reloads, frozenset({self.worker}))

    def took(self) -> list[str]:
        calls, self.calls = self.calls, []
        return [call for call in calls if call in ("start", "restart", "reload")]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    played = Server(tmp_path)
    (tmp_path / "systemd").mkdir()
    monkeypatch.setattr(service, "SYSTEMD", tmp_path / "systemd")
    monkeypatch.setattr(units, "systemctl", played.systemctl)
    monkeypatch.setattr(units, "properties", played.properties)
    monkeypatch.setattr(shutil, "which", lambda name, path: f"/usr/bin/{name}")
    monkeypatch.setattr(service, "run_program", played.run)
    monkeypatch.setattr(service, "workers", played.workers)
    monkeypatch.setattr(service, "PAUSE_SECONDS", 0)
    return played


@pytest.fixture
def wanted(server: Server) -> service.Service:
    files = {"haproxy.cfg": "one\n", "models.map": "a b\n"}
    folder = server.root / "etc"
    return service.Service(UNIT, "[Unit]\n", folder, files, server.runtime, ("haproxy", "-c", "-f"), "haproxy.cfg")


def other(wanted: service.Service, text: str = "two\n") -> service.Service:
    return replace(wanted, files={**wanted.files, "haproxy.cfg": text})


def tree(root: Path) -> dict[str, Any]:
    return {
        str(path): (stat.S_IFMT(path.lstat().st_mode), path.read_text() if path.is_file() else "")
        for path in sorted(root.rglob("*"))
    }


def settled(server: Server, wanted: service.Service) -> bool:
    """Say whether a run finds nothing to do, and what runs is what is wanted."""
    server.calls.clear()
    result = service.bring(wanted, check=False)
    return (result.changed, server.took()) == (False, []) and server.running == dict(wanted.files)


def test_first_run_starts_and_second_changes_nothing(server: Server, wanted: service.Service) -> None:
    assert service.bring(wanted, check=False).changed
    assert server.took() == ["start"]
    assert settled(server, wanted)


def test_new_files_are_a_reload(server: Server, wanted: service.Service) -> None:
    service.bring(wanted, check=False)
    server.took()
    result = service.bring(other(wanted), check=False)
    assert (server.took(), result.summary) == (["reload"], f"{UNIT}: reloaded")
    assert settled(server, other(wanted))


def by_hand_content(server: Server) -> None:
    (server.current / "haproxy.cfg").write_text("by hand\n")


def by_hand_gone(server: Server) -> None:
    (server.current / "models.map").unlink()


def by_hand_more(server: Server) -> None:
    (server.current / "more.cfg").write_bytes(b"\xff")


def by_hand_folder(server: Server) -> None:
    target = server.current.resolve()
    server.current.unlink()
    target.rename(server.current)


def by_hand_reloaded(server: Server) -> None:
    by_hand_content(server)
    server.systemctl("reload", UNIT)


@pytest.mark.parametrize("drift", [by_hand_content, by_hand_gone, by_hand_more, by_hand_folder, by_hand_reloaded])
def test_change_by_hand_is_put_right_by_one_reload(
    server: Server, wanted: service.Service, drift: Callable[[Server], None]
) -> None:
    service.bring(wanted, check=False)
    drift(server)
    server.took()
    shown = service.bring(wanted, check=True)
    assert (shown.changed, server.took()) == (True, [])
    assert "would be reloaded" in shown.summary
    assert service.bring(wanted, check=False).changed
    assert server.took() == ["reload"]
    assert service.content(server.current) == dict(wanted.files)
    assert settled(server, wanted)


def test_changed_folder_is_replaced_whole(
    server: Server, wanted: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.bring(wanted, check=False)
    by_hand_content(server)
    seen = []

    def look(path: Path, target: str) -> None:
        seen.append((service.content(path), service.content(path.parent / target)))
        link(path, target)

    monkeypatch.setattr(service, "link", look)
    service.bring(wanted, check=False)
    assert seen == [({**wanted.files, "haproxy.cfg": "by hand\n"}, dict(wanted.files))]


def test_run_killed_before_the_reload_is_finished(
    server: Server, wanted: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.bring(wanted, check=False)

    def killed(*words: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(service, "_act", killed)
        with pytest.raises(KeyboardInterrupt):
            service.bring(other(wanted), check=False)
    server.took()
    service.bring(other(wanted), check=False)
    assert server.took() == ["reload"]
    assert settled(server, other(wanted))


@pytest.mark.parametrize("crashed_since", [False, True])
def test_run_killed_before_systemd_read_the_unit_is_finished(
    server: Server, wanted: service.Service, crashed_since: bool
) -> None:
    service.bring(wanted, check=False)
    new = replace(wanted, unit_text="[Unit]\nDescription=new\n")
    (server.root / "systemd" / UNIT).write_text(new.unit_text)
    server.unread = True
    if crashed_since:
        server.start()
    server.calls.clear()
    service.bring(new, check=False)
    assert server.calls.index("daemon-reload") < server.calls.index("restart")
    assert settled(server, new)


def test_reload_that_no_new_worker_took_is_not_recorded(server: Server, wanted: service.Service) -> None:
    service.bring(wanted, check=False)
    server.binds = False
    server.took()
    with pytest.raises(Failed) as failed:
        service.bring(other(wanted), check=False)
    sentence = failed.value.failures[0].sentence()
    assert "cannot bind socket for [192.0.2.1:8090]" in sentence
    assert "the former configuration serves on and is the current one again" in sentence
    assert server.running == dict(wanted.files) == service.content(server.current)
    server.took()
    assert settled(server, wanted), "what runs is known again"
    with pytest.raises(Failed):
        service.bring(other(wanted), check=False)
    server.binds = True
    service.bring(other(wanted), check=False)
    assert settled(server, other(wanted))


def test_reload_by_somebody_else_is_not_trusted(server: Server, wanted: service.Service) -> None:
    service.bring(wanted, check=False)
    server.systemctl("reload", UNIT)
    server.took()
    service.bring(wanted, check=False)
    assert server.took() == ["reload"]
    assert settled(server, wanted)


def test_check_says_would_and_leaves_nothing(server: Server, wanted: service.Service) -> None:
    before = tree(server.root)
    assert service.bring(wanted, check=True).summary == f"{UNIT}: would be started"
    assert tree(server.root) == before
    service.bring(wanted, check=False)
    before = tree(server.root)
    server.calls.clear()
    assert service.bring(other(wanted), check=True).summary == f"{UNIT}: would be reloaded"
    new_unit = replace(wanted, unit_text="[Unit]\nDescription=new\n")
    assert service.bring(new_unit, check=True).summary == f"{UNIT}: would be restarted"
    assert (tree(server.root), server.calls) == (before, [])


@pytest.mark.parametrize("check", [True, False])
def test_bad_files_are_refused_and_leave_nothing(server: Server, wanted: service.Service, check: bool) -> None:
    service.bring(wanted, check=False)
    before = tree(server.root)
    server.check_says = "[NOTICE] version\n[ALERT] haproxy.cfg:3: unknown keyword\n"
    with pytest.raises(Refusal, match=r"haproxy does not take haproxy\.cfg: .*unknown keyword"):
        service.bring(other(wanted), check=check)
    assert tree(server.root) == before


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("PATH:3: Unknown key 'X' in section [Service], ignoring.\n", False),
        (f"{UNIT}: Service has no ExecStart=, ExecStop=, or SuccessAction=. Refusing.\n", False),
        (f"Unit {UNIT} has a bad unit file setting.\n", False),
        ("/lib/systemd/system/other.service:3: Unknown key 'X' in section [Service], ignoring.\n", True),
        ("other.service: Command /usr/bin/other is not executable: No such file or directory\n", True),
    ],
)
def test_only_what_systemd_says_of_our_own_unit_counts(server: Server, said: str, taken: bool, check: bool) -> None:
    server.verify_says = said
    if taken:
        assert service.place_unit(UNIT, "[Unit]\n", check) is not None
    else:
        with pytest.raises(Refusal, match=f"systemd does not take {UNIT}"):
            service.place_unit(UNIT, "[Unit]\n", check)
    assert (service.SYSTEMD / UNIT).exists() == (taken and not check)


def test_program_of_an_earlier_stage_may_lack_under_check(server: Server) -> None:
    server.verify_says = f"{UNIT}: Command /usr/sbin/haproxy is not executable: No such file or directory\n"
    assert service.place_unit(UNIT, "[Unit]\n", check=True) is not None
    with pytest.raises(Refusal):
        service.place_unit(UNIT, "[Unit]\n", check=False)


def test_template_units_are_known_by_their_instance() -> None:
    name, staged = "gpuready-engine@.service", Path("/t/gpuready-engine@.service")
    said = (
        "gpuready-engine@test_instance.service: bad\ngpuready-enginex.service: no\n/t/gpuready-engine@.service:1: x\n"
    )
    assert len(service.about(name, staged, said)) == 2


def test_masters_answer_is_read() -> None:
    said = (
        "#<PID>          <type>          <reloads>       <uptime>        <version>\n"
        "316             master          2 [failed: 1]   0d00h10m16s     3.0.11-1+deb13u5\n"
        "# workers\n357             worker          1               0d00h00m05s     3.0.11\n"
        "# old workers\n319             worker          3               0d00h10m11s     3.0.11\n# programs\n\n"
    )
    assert service.workers_from(said) == service.Workers(2, frozenset({357}), frozenset({319}))
    assert service.workers_from(said.replace("2 [failed: 1]", "2")) == service.workers_from(said)
    assert service.workers_from("") is None


# ------------------------------------------------------------------------------------------------ the gateway's proof


@dataclass
class Door:
    """The gateway and its engine; `says` is what a request for a token meets."""

    server: Server
    root: Path
    says: BaseException | None = None
    lists: BaseException | None = None
    tokens: int = 0
    table: str = ""

    def one_token(self, asked: Asked) -> str:
        self.tokens += 1
        if self.says is not None:
            raise NotReady(str(self.says)) from self.says
        return "x"

    def open(self, url: str, timeout: float) -> Any:
        if self.lists is not None:
            raise self.lists
        return _Json()

    def apply(self, files: dict[str, str] | None = None, check: bool = False) -> Any:
        plan = {
            "gateway": {"port": 8090, "bind": "*", "folder": str(self.server.root / "etc")},
            "deployments": [{"name": "chat", "model": "m", "replicas": [{"index": 0}]}],
        }
        machine = Machine(self.root, lambda argv: Done(0 if self.table else 1, self.table, ""))
        one = gateway.Gateway(plan, self.server.runtime, machine)
        return one.apply(files or {"haproxy.cfg": "one\n"}, "[Unit]\n", check)


class _Json:
    def __enter__(self) -> _Json:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> str:
        return '{"data": []}'


@pytest.fixture
def door(server: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Door:
    played = Door(server, tmp_path_factory.mktemp("machine"))
    monkeypatch.setattr(gateway, "one_token", played.one_token)
    monkeypatch.setattr(gateway, "_DIRECT", played)
    monkeypatch.setattr(gateway, "TOKEN_SECONDS", 0)
    monkeypatch.setattr(gateway, "PAUSE_SECONDS", 0)
    return played


def http(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", code, "", Message(), None)


BUSY = [http(429), http(503), TimeoutError("timed out"), urllib.error.URLError(TimeoutError("timed out"))]


def test_proved_configuration_is_not_proved_again(door: Door) -> None:
    door.apply()
    assert door.tokens == 1
    door.says = http(500)
    result = door.apply()
    assert (result.changed, result.data["notes"], door.tokens) == (False, [], 1)
    door.says = None
    door.apply({"haproxy.cfg": "two\n"})
    assert door.tokens == 2
    door.server.start()
    door.apply({"haproxy.cfg": "two\n"})
    assert door.tokens == 3, "another process has not been proved"


@pytest.mark.parametrize("error", BUSY)
def test_busy_engine_is_said_and_asked_again(door: Door, error: BaseException) -> None:
    door.says = error
    result = door.apply()
    assert "chat is busy" in result.summary
    assert result.data["notes"][0] in result.summary
    door.says = None
    before = door.tokens
    assert door.apply().data["notes"] == []
    assert door.tokens == before + 1


@pytest.mark.parametrize("error", [http(404), http(502), ConnectionRefusedError("Connection refused")])
def test_engine_that_does_not_answer_is_a_failure(door: Door, error: BaseException) -> None:
    door.says = error
    with pytest.raises(Failed, match="chat does not answer through the gateway"):
        door.apply()


def test_busy_is_no_excuse_when_no_engine_runs(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.says = http(503)
    monkeypatch.setattr(units, "unit_of", lambda replica: "engine")
    known = door.server.properties

    def properties(unit: str, *names: str) -> dict[str, str]:
        return {"ActiveState": "failed"} if unit == "engine" else known(unit, *names)

    monkeypatch.setattr(units, "properties", properties)
    with pytest.raises(Failed, match="chat does not answer"):
        door.apply()


def test_run_without_a_change_still_sees_that_the_door_is_shut(door: Door) -> None:
    door.apply()
    door.lists = TimeoutError("timed out")
    assert "is busy" in door.apply().summary
    door.lists = urllib.error.URLError(ConnectionRefusedError("refused"))
    with pytest.raises(Failed, match="does not answer /v1/models"):
        door.apply()


@pytest.mark.parametrize(
    ("rule", "opened"),
    [
        ("tcp dport 8090 accept", True),
        ("ip saddr 10.0.0.0/8 tcp dport 8090 accept", True),
        ("tcp dport { 22, 8080-8099 } accept", True),
        ("tcp dport 8080 accept", False),
        ("tcp dport 8090 drop", False),
        ("udp dport 8090 accept", False),
        ("tcp sport 8090 accept", False),
    ],
)
def test_closed_port_is_said(door: Door, rule: str, opened: bool) -> None:
    door.table = (
        f'table inet gpuready {{\n\tchain input {{\n\t\ttcp dport 22 accept comment "SSH"\n\t\t{rule}\n\t}}\n}}\n'
    )
    assert door.apply().data["notes"] == [], "the stage base has not set up a packet filter here"
    Machine(door.root).write(firewall.FILE, "")
    for check in (True, False):
        result = door.apply(check=check)
        assert ("port 8090 is closed by the packet filter" in result.summary) is not opened
        assert len(result.data["notes"]) == (0 if opened else 1)
    door.table = ""
    assert door.apply().data["notes"] == [], "nothing is filtered while the table is not loaded"


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("*", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("::", "[::1]"),
        ("fd00::1", "[fd00::1]"),
        ("[fd00::1]", "[fd00::1]"),
    ],
)
def test_door_is_asked_where_it_listens(bind: str, address: str) -> None:
    assert gateway.reachable(bind) == address
