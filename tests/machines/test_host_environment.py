"""Servers with other surroundings: language, another Python, read-only folders, a wrong clock, nothing but a proxy.

After field reports: ansible#83608 and #86621, HushMic#2, gpu-operator#2382, deepops#40, ZANSIN#62.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from sim.machine import process
from sim.machine.common import Sim
from sim.machine.machine import Machine
from tests.machines.conftest import Factory, Play, Played

pytestmark = pytest.mark.machine

HOST = "h100-sg-01"
PREFLIGHT = "playbooks/preflight.yml"
GERMAN = ["LANGUAGE=en_GB:de", "LANG=de_DE.UTF-8", "LC_NUMERIC=de_DE"]
UNKNOWN = ["LC_ALL=xx_YY.UTF-8", "LANG=xx_YY.UTF-8"]
STATE = "dpkg-query -W | sha256sum; find /etc /opt /srv /usr/local /var/lib -xdev -newer /root/before | sort"


def said(played: Played) -> str:
    assert "Traceback" not in played.stdout
    return " ".join(played.stdout.split())


@pytest.fixture(scope="module")
def fresh(machines: Factory) -> Iterator[Machine]:
    """A blank server that all refusals share: none of them may change it."""
    machine = machines("surroundings")
    machine.ssh("touch /root/before")
    yield machine
    machines.give_back(machine)


# ------------------------------------------------------------------------------------------------ language


def speak(machine: Machine, variables: list[str]) -> None:
    """Set a language in all places from which a login takes it; sshd takes what the client sends as well."""
    lines = "".join(f"{variable}\n" for variable in variables)
    for file in ("/etc/environment", "/etc/default/locale", "/etc/locale.conf"):
        machine.ssh(["tee", file], stdin=lines)


def test_a_locale_that_is_not_generated_is_told_and_stops_nothing(fresh: Machine, play: Play) -> None:
    speak(fresh, UNKNOWN)
    try:
        assert fresh.ssh("echo $LC_ALL").stdout.strip() == "xx_YY.UTF-8", "the login has it"
        played = play(fresh, PREFLIGHT)
    finally:
        speak(fresh, [])
    assert played.rc == 0, played.stdout
    assert f"{HOST}: note: the locale xx_YY.UTF-8 (LANG, LC_ALL) is not generated there" in said(played)


@pytest.mark.long
@pytest.mark.parametrize("variables", [GERMAN, UNKNOWN], ids=["german", "unknown"])
def test_the_second_run_changes_nothing_in_any_language(
    finished_clone: Machine, play: Play, variables: list[str]
) -> None:
    finished_clone.ssh(
        "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq locales && "
        "printf 'de_DE.UTF-8 UTF-8\\nde_DE ISO-8859-1\\n' > /etc/locale.gen && locale-gen",
        timeout=600,
    )
    speak(finished_clone, variables)
    if variables == GERMAN:
        spoken = finished_clone.ssh("printf '%.1f\\n' 1,5; LANGUAGE=de dpkg --nothing", check=False)
        assert "1,5" in spoken.stdout, "the login speaks German"
    played = play(finished_clone)
    assert played.rc == 0, played.stdout
    assert played.recap[HOST]["changed"] == 0, said(played)
    # What apt and dpkg answer to an installation is understood as well.
    finished_clone.ssh("apt-get remove -yq numactl")
    repaired = play(finished_clone, "playbooks/base.yml")
    assert (repaired.rc, repaired.recap[HOST]["changed"]) == (0, 1), said(repaired)
    assert play(finished_clone, "playbooks/base.yml").recap[HOST]["changed"] == 0


# ------------------------------------------------------------------------------------------------ Python


def test_another_python_is_used_and_a_broken_one_is_a_sentence(fresh: Machine, play: Play) -> None:
    other = "/opt/an other/bin/python3"
    fresh.ssh(f"mkdir -p '/opt/an other/bin' && ln -s $(readlink -f /usr/bin/python3) '{other}'")
    try:
        nowhere = play(fresh, PREFLIGHT, {"ansible_python_interpreter": "/opt/none/python3"})
        fresh.ssh("mv /usr/bin/python3 /usr/bin/python3.away && printf '#!/bin/sh\\nexit 42\\n' > /usr/bin/python3")
        fresh.ssh("chmod 755 /usr/bin/python3")
        broken = play(fresh, PREFLIGHT, {"ansible_python_interpreter": other})
    finally:
        fresh.ssh("rm -rf '/opt/an other'; test -e /usr/bin/python3.away && mv /usr/bin/python3.away /usr/bin/python3")
    assert nowhere.rc == 2
    assert "see that /opt/none/python3 (3.10 or newer, ansible_python_interpreter) works on the server" in said(nowhere)
    assert broken.rc == 2
    assert f"host {HOST}: /usr/bin/python3 does not run on this server: exit code 42; repair it: engines" in said(
        broken
    )


# ------------------------------------------------------------------------------------------------ read-only folders


READ_ONLY = {"/usr": "ro", "/etc": "ro", "/opt": "noexec", "/var/lib": "noexec"}


def test_what_cannot_be_written_or_run_is_refused_before_any_change(fresh: Machine, play: Play) -> None:
    before = fresh.ssh(STATE).stdout
    for folder, option in READ_ONLY.items():
        fresh.ssh(f"mount --bind {folder} {folder} && mount -o remount,bind,{option} {folder}")
    try:
        played = play(fresh, "site.yml")
    finally:
        for folder in READ_ONLY:
            fresh.ssh(f"umount --lazy {folder}")
    assert played.rc == 2, played.stdout
    for words in (
        "/usr is mounted read-only: gpuready writes to /usr; mount it writable",
        "/etc is mounted read-only: gpuready writes to /etc/apt/apt.conf.d, /etc/apt/sources.list.d, /etc/gpuready, ",
        "/opt is mounted noexec: gpuready runs programs from /opt/gpuready; mount -o remount,exec /opt",
        "/var/lib is mounted noexec: gpuready runs programs from /var/lib/dpkg",
    ):
        assert f"host {HOST}: {words}" in said(played)
    assert played.recap[HOST]["changed"] == 0
    assert fresh.ssh(STATE).stdout == before


# ------------------------------------------------------------------------------------------------ clock


# A package source whose lists are valid from now on, for a week.
DATED = """
set -e
mkdir -p /srv/dated && cd /srv/dated && : > Packages
{
  echo "Origin: a test"
  echo "Date: $(date -uR -d '1 hour ago')"
  echo "Valid-Until: $(date -uR -d '7 days')"
  echo "SHA256:"
  echo " $(sha256sum Packages | cut -d' ' -f1) 0 Packages"
} > Release
echo 'deb [trusted=yes check-date=yes check-valid-until=yes] file:/srv/dated ./' > /etc/apt/sources.list.d/dated.list
"""
# Only the time of day is wrong on such a server: how long something takes, it knows.
FAKED = "FAKETIME_DONT_FAKE_MONOTONIC=1\nNO_FAKE_STAT=1\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("shift", "told", "refused"),
    [("-17d", "17 days behind", "is not valid yet"), ("+1096d", "1096 days ahead of", "is expired")],
    ids=["behind", "ahead"],
)
def test_a_wrong_clock_is_told_and_named_where_something_refuses(
    blank: Machine, play: Play, shift: str, told: str, refused: str
) -> None:
    blank.ssh("apt-get update -q && apt-get install -yq --no-install-recommends libfaketime", timeout=300)
    blank.ssh(["tee", "/etc/environment"], stdin=FAKED)
    blank.ssh(f"echo '{shift}' > /etc/faketimerc && ls /usr/lib/*/faketime/libfaketime.so.1 > /etc/ld.so.preload")
    alone = play(blank, "playbooks/agent.yml")
    assert alone.rc == 0, "a clock alone stops nothing"
    assert f"{HOST}: note: its clock is {told} this machine's" in said(alone)
    blank.ssh("mv /etc/ld.so.preload /root/preload")
    blank.ssh(DATED)
    blank.ssh("mv /root/preload /etc/ld.so.preload; rm -rf /var/lib/apt/lists/*")
    own = {"cuda_source": "configured", "cuda_packages": ["cuda-toolkit-12-4"], "cuda_version": "12.4"}
    runs: list[tuple[str, Mapping[str, object]]] = [(PREFLIGHT, own)]
    if refused == "is not valid yet":
        # Debian's own lists, too; they never expire, so a clock that is ahead leaves all that base needs.
        runs.append(("playbooks/base.yml", {}))
    for playbook, extra in runs:
        played = play(blank, playbook, extra)
        assert played.rc == 2, played.stdout
        assert refused in said(played)
        assert "; the server's clock says 20" in said(played)
        assert "timedatectl set-ntp true" in said(played)


# ------------------------------------------------------------------------------------------------ proxy

PROXY = Path(__file__).with_name("password_proxy.py")
PASSWORD = "s3cr3t:p@ss"  # noqa: S105 - the test's own


@pytest.fixture
def proxy(sim: Sim, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A proxy on the bridge that asks for a password: its address with the password, and its log."""
    with socket.socket() as free:
        free.bind((sim.gateway, 0))
        port = free.getsockname()[1]
    log = tmp_path / "proxy.log"
    log.touch()
    argv = [sys.executable, str(PROXY), sim.gateway, str(port), f"user:{PASSWORD}", str(log)]
    with subprocess.Popen(argv) as running:
        for _ in range(100):
            if process.port_open(sim.gateway, port):
                break
            time.sleep(0.05)
        yield f"http://user:{quote(PASSWORD, safe='')}@{sim.gateway}:{port}", log
        running.terminate()


CUT = """table inet cut {
  chain out { type filter hook output priority 0; policy accept;
    oifname "lo" accept
    ip daddr %s accept
    ct state established,related accept
    reject
  }
}
"""


def leaks(machine: Machine) -> str:
    """Return where on the machine the password can be found: files outside /proc, journal, and what argv showed."""
    found = machine.ssh(
        "grep -rlE 's3cr3t' /etc /opt /srv /run /tmp /var /root --exclude-dir={archives,site-packages} 2>/dev/null; "
        "journalctl --no-pager -q | grep s3cr3t; cat /root/argv.log 2>/dev/null | grep s3cr3t",
        check=False,
        timeout=300,
    )
    return str(found.stdout)


WATCH = """
import pathlib, time
seen = set()
with open("/root/argv.log", "a") as log:
    while True:
        for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = file.read_text(errors="replace").replace("\\0", " ")
            except OSError:
                continue
            if line not in seen:
                seen.add(line)
                log.write(line + "\\n")
                log.flush()
        time.sleep(0.2)
"""
"""Writes down every command line that any user of the machine could have read."""


@pytest.mark.long
def test_a_server_that_reaches_nothing_but_a_proxy(
    machines: Factory, play: Play, proxy: tuple[str, Path], sim: Sim
) -> None:
    address, log = proxy
    machine = machines("proxied")
    machine.ssh("apt-get update -q && apt-get install -yq --no-install-recommends nftables", timeout=300)
    machine.ssh(["nft", "-f", "-"], stdin=CUT % sim.gateway)
    assert machine.ssh(
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80), 5)'", check=False
    ).returncode
    refused = play(machine, PREFLIGHT)
    assert refused.rc == 2
    assert "gpuready_proxy" in said(refused)
    machine.ssh(["systemd-run", "--quiet", "--unit", "argv-watch", "/usr/bin/python3", "-c", WATCH])
    setting = {"gpuready_proxy": {"http": address}}
    played = play(machine, "site.yml", None, "--diff", "-vv", group_vars=setting)
    assert played.rc == 0, played.stdout[-5000:]
    machine.ssh("systemctl stop argv-watch")
    asked = log.read_text().splitlines()
    assert any(line.startswith("True GET http://deb.debian.org") for line in asked), asked[:5]
    assert any(line.startswith("True CONNECT") for line in asked), "uv and pip too"
    assert not any("127.0.0.1" in line or "localhost" in line for line in asked), "never for this server itself"
    assert "s3cr3t" not in played.stdout
    assert "apt-get" in machine.ssh("grep -a apt-get /root/argv.log | head -1").stdout, "the watch has seen commands"
    assert leaks(machine) == ""
    again = play(machine, "site.yml", None, "--diff", group_vars=setting)
    assert (again.rc, again.recap[HOST]["changed"]) == (0, 0), said(again)
    # A proxy with the wrong password is one sentence, without the password.
    machine.ssh("chmod -R u+w /opt/gpuready/engines && rm -rf /opt/gpuready/engines/* /opt/gpuready/tools/*")
    wrong = play(
        machine,
        "playbooks/engines.yml",
        None,
        "-vvvv",
        group_vars={"gpuready_proxy": {"http": address.replace("s3cr3t", "s3cr3tX")}},
    )
    assert wrong.rc == 2
    assert "s3cr3t" not in wrong.stdout
    assert "407" in said(wrong)
    machines.give_back(machine)


@pytest.mark.long
def test_a_proxy_of_the_environment_does_not_stand_before_the_engines(finished_clone: Machine, play: Play) -> None:
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    finished_clone.ssh(["tee", "/etc/environment"], stdin="".join(f"{name}=http://127.0.0.1:9\n" for name in names))
    finished_clone.ssh(["tee", "/etc/systemd/system.conf.d/p.conf"], stdin="", check=False)
    finished_clone.ssh(
        "mkdir -p /etc/systemd/system.conf.d; printf '[Manager]\\nDefaultEnvironment=http_proxy=http://127.0.0.1:9 "
        "HTTP_PROXY=http://127.0.0.1:9\\n' > /etc/systemd/system.conf.d/proxy.conf; systemctl daemon-reexec; "
        "systemctl restart 'gpuready-engine@chat.0.service' gpuready-gateway.service",
        timeout=300,
    )
    played = play(finished_clone)
    assert played.rc == 0, said(played)
    assert played.recap[HOST]["changed"] == 0
    status = json.loads(finished_clone.ssh("gpuready deployment status --json </dev/null").stdout)
    assert status["failures"] == []
