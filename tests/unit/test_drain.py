"""A replica is taken out of a real HAProxy's hands and let in again: no request is cut or refused."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.gateway_door import HAPROXY, PATH, free_port, needs_haproxy, render

from gpuready.operations.drain import Drain, Seat, seats_from
from gpuready.serving import figures

ENGINE = Path(__file__).with_name("standin_engine.py")
REPLICA = "chat.0"


def wait_for(port: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as asked:
            asked.connect()
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}")


class Engine:
    """A process that streams."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, str(ENGINE), str(self.port)])
        wait_for(self.port)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def running(self) -> int | None:
        return figures.running("vllm", self.port)


@contextlib.contextmanager
def engines(*ports: int) -> Iterator[list[Engine]]:
    made = [Engine(port) for port in ports]
    try:
        yield made
    finally:
        for one in made:
            one.stop()


@dataclass
class Gateway:
    port: int
    runtime: Path
    process: subprocess.Popen[bytes]

    def reload(self) -> None:
        self.process.send_signal(signal.SIGUSR2)
        time.sleep(1.0)


@contextlib.contextmanager
def gateway(folder: Path, *ports: int, without: str = "user ") -> Iterator[Gateway]:
    """Run HAProxy with master and worker, as its unit does; lines that begin with `without` are left out."""
    port, runtime = free_port(), folder / "run"
    runtime.mkdir()
    for name, text in render(port, *ports, hold_seconds=30, request_timeout_seconds=30).items():
        text = "\n".join(
            line for line in text.splitlines() if not line.strip().startswith((without, "user ", "group "))
        )
        (folder / name).write_text(text.replace("/run/gpuready-gateway", str(runtime)) + "\n")
    words = [HAPROXY, "-W", "-f", str(folder / "haproxy.cfg"), "-S", f"{runtime / 'master.sock'},mode,600"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=os.setpgrp)
        try:
            wait_for(port)
            yield Gateway(port, runtime, process)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@dataclass
class Clients:
    """Streams that end, and short requests that come one after the other for as long as the test goes on."""

    port: int
    whole: int = 0
    bad: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def ask(self, pieces: int = 1, pause: float = 0.0, connection: http.client.HTTPConnection | None = None) -> None:
        started = time.monotonic()
        try:
            asked = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            body = f'{{"model": "meta-llama/Llama-3.3", "pieces": {pieces}, "pause": {pause}}}'
            asked.request("POST", PATH, body)
            answer = asked.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.bad.append(repr(error))
            return
        if answer.status != 200 or said.count(b"data: ") != pieces + 1 or b"[DONE]" not in said:
            self.bad.append(f"{answer.status} {said[-200:]!r}")
        self.whole += 1
        self.slowest = max(self.slowest, time.monotonic() - started)

    @contextlib.contextmanager
    def going_on(self, streams: int, seconds: float) -> Iterator[None]:
        """Have streams of that length in flight, and short requests going on until the end of the context."""
        over = threading.Event()

        def short(kept: bool) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60) if kept else None
            while not over.is_set():
                self.ask(connection=connection)
                time.sleep(0.01)

        threads = [threading.Thread(target=self.ask, args=(int(seconds * 20), 0.05)) for _ in range(streams)]
        threads += [threading.Thread(target=short, args=(kept,)) for kept in (True, True, False, False)]
        for one in threads:
            one.start()
        time.sleep(0.4)
        try:
            yield
        finally:
            over.set()
            for one in threads:
                one.join()


@needs_haproxy
def test_the_only_replica_restarts_and_nothing_is_lost(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port) as door:
        clients, drain = Clients(door.port), Drain(30, door.runtime)
        with clients.going_on(streams=4, seconds=2), drain.out(REPLICA, only.port, only.running):
            served = clients.whole
            assert only.running() == 0
            only.stop()
            time.sleep(1.5)
            # What came meanwhile is held.
            assert clients.whole == served
            only.start()
        assert clients.bad == []
        assert clients.whole > served
        assert clients.slowest > 1.5
        assert drain.notes == []
        assert not drain.is_out(REPLICA, only.port)


@needs_haproxy
def test_two_replicas_restart_one_after_the_other_under_load(tmp_path: Path) -> None:
    with engines(free_port(), free_port()) as both, gateway(tmp_path, *(one.port for one in both)) as door:
        clients, drain = Clients(door.port), Drain(30, door.runtime)
        with clients.going_on(streams=4, seconds=1):
            for number, one in enumerate(both):
                served = clients.whole
                with drain.out(f"chat.{number}", one.port, one.running):
                    one.stop()
                    time.sleep(0.5)
                    assert clients.whole > served, "the other replica serves meanwhile"
                    one.start()
        assert clients.bad == []
        assert drain.notes == []


@needs_haproxy
def test_a_reload_in_the_middle_neither_cuts_nor_lets_in(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port) as door:
        clients, drain = Clients(door.port), Drain(30, door.runtime)
        streams = [threading.Thread(target=clients.ask, args=(60, 0.05)) for _ in range(3)]
        for one in streams:
            one.start()
        time.sleep(0.3)
        reloads = threading.Timer(0.5, door.reload)
        reloads.start()
        with drain.out(REPLICA, only.port, only.running):
            assert not any(one.is_alive() for one in streams), "those of the old worker are waited for"
            reloads.join()
            assert drain.is_out(REPLICA, only.port)
            only.stop()
            held = threading.Thread(target=clients.ask)
            held.start()
            time.sleep(0.5)
            only.start()
        held.join()
        assert (clients.whole, clients.bad) == (4, [])


@needs_haproxy
def test_what_a_killed_run_left_out_is_found_and_let_in(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port) as door:
        Drain(30, door.runtime).take_out(REPLICA, only.running)
        following = Drain(30, door.runtime)
        assert following.is_out(REPLICA, only.port)
        # On another port it is not what the gateway knows: its next configuration lets it in.
        assert not following.let_in(REPLICA, only.port + 1)
        assert following.is_out(REPLICA, only.port)
        assert following.let_in(REPLICA, only.port)
        assert not following.is_out(REPLICA, only.port)
        following.take_out(REPLICA, only.running)
        door.reload()
        assert not following.is_out(REPLICA, only.port), "a gateway that reloads has nobody drained"


@needs_haproxy
def test_what_does_not_end_in_time_is_said(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port) as door:
        clients, drain = Clients(door.port), Drain(1, door.runtime)
        stream = threading.Thread(target=clients.ask, args=(60, 0.05))
        stream.start()
        time.sleep(0.3)
        drain.take_out(REPLICA, only.running)
        assert drain.notes == ["chat.0 was stopped with 1 request in flight after 1 s of draining"]
        stream.join()


@needs_haproxy
def test_requests_that_did_not_come_through_the_gateway_are_waited_for(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port) as door:
        direct, drain = Clients(only.port), Drain(30, door.runtime)
        stream = threading.Thread(target=direct.ask, args=(30, 0.05))
        stream.start()
        time.sleep(0.3)
        drain.take_out(REPLICA, only.running)
        assert not stream.is_alive()
        assert (direct.whole, direct.bad) == (1, [])


@needs_haproxy
def test_a_configuration_that_holds_nothing_is_not_drained(tmp_path: Path) -> None:
    with engines(free_port()) as (only,), gateway(tmp_path, only.port, without="server hold") as door:
        drain = Drain(30, door.runtime)
        with drain.out(REPLICA, only.port, only.running):
            assert not drain.is_out(REPLICA, only.port)
        (said,) = drain.notes
        assert "backend deployment_chat of the gateway's configuration has no server that holds its requests" in said


def test_without_a_gateway_there_is_nothing_to_drain(tmp_path: Path) -> None:
    def asked() -> int:
        raise AssertionError("nobody is waited for")

    drain = Drain(30, tmp_path / "run")
    with drain.out(REPLICA, 18100, asked):
        pass
    assert (drain.notes, drain.is_out(REPLICA, 18100)) == ([], False)


def test_answers_of_haproxy_are_read() -> None:
    # The columns that matter, of HAProxy 2.6 and 3.0. What is drained and down is told as DOWN.
    stat = (
        "# pxname,svname,qcur,scur,status,addr,\n"
        "api,FRONTEND,,3,OPEN,,\n"
        "deployment_chat,chat.0,0,2,DOWN,127.0.0.1:18100,\n"
        "deployment_chat,hold,0,4,no check,127.0.0.1:1,\n"
        "deployment_chat,BACKEND,0,6,UP,,\n"
    )
    state = (
        "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_port\n"
        "3 deployment_chat 1 chat.0 127.0.0.1 0 8 18100\n"
        "3 deployment_chat 2 hold 127.0.0.1 2 0 1\n\n"
    )
    drained, hold = seats_from(7, stat, state)
    assert drained == Seat(7, "deployment_chat", "chat.0", True, False, 2, 18100)
    assert (drained.path, drained.is_usable, hold.is_usable) == ("deployment_chat/chat.0", False, True)
    assert seats_from(7, "", "") == []
