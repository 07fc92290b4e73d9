"""The machine builder's decisions, without booting anything."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sim import quickstart
from sim.gpusim import main as cli
from sim.machine import apt_cache, doctor, identity, image, machine, network, packages, pool, process, servers, sources
from sim.machine.common import (
    CANNOT,
    CHECKOUT,
    FAILED,
    REFUSED,
    Sim,
    SimError,
    read_json,
    run,
    tree_hash,
    write_atomically,
)
from sim.machine.servers import Kind

from gpuready.spec.check import check_declaration


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    return Sim.from_environment({"GPUREADY_SIM_STATE": str(tmp_path / "state")})


def link(name: str, address: str, length: int) -> dict[str, Any]:
    return {"ifname": name, "addr_info": [{"local": address, "prefixlen": length}]}


OURS = ipaddress.IPv4Network("10.89.37.0/24")


@pytest.mark.parametrize(
    ("addresses", "routes", "holder"),
    [
        ([link("eth0", "10.89.37.5", 24)], [], "10.89.37.5/24 on eth0"),
        ([link("vpn", "10.0.0.1", 8)], [], "10.0.0.1/8 on vpn"),
        ([], [{"dst": "10.89.0.0/16", "dev": "wg0"}], "the route 10.89.0.0/16 on wg0"),
        ([], [{"dst": "10.89.37.77", "dev": "wg0"}], "the route 10.89.37.77 on wg0"),
        ([link("gpuready-sim0", "10.89.37.1", 24)], [{"dst": "10.89.37.0/24", "dev": "gpuready-sim0"}], None),
        (
            [link("eth0", "192.0.2.2", 24)],
            [{"dst": "default", "dev": "eth0"}, {"dst": "0.0.0.0/1", "dev": "tun"}],
            None,
        ),
    ],
)
def test_who_uses_the_range(addresses: list[dict[str, Any]], routes: list[dict[str, Any]], holder: str | None) -> None:
    assert network.taken_by(OURS, "gpuready-sim0", addresses, routes) == holder


def test_the_environment_names_range_and_state(tmp_path: Path) -> None:
    sim = Sim.from_environment({})
    assert (str(sim.state), str(sim.subnet), sim.bridge, sim.table) == (
        "/var/lib/gpuready-sim",
        "10.89.37.0/24",
        "gpuready-sim0",
        "gpuready_sim",
    )
    other = Sim.from_environment({"GPUREADY_SIM_STATE": str(tmp_path), "GPUREADY_SIM_SUBNET": "10.1.0.0/16"})
    assert other.bridge != sim.bridge
    assert len(other.bridge) <= 15
    assert (other.gateway, other.address(11)) == ("10.1.0.1", "10.1.0.11")
    assert other.table in network.ruleset(other)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GPUREADY_SIM_SUBNET": "10.1.0.5/24"}, "is not an IPv4 range"),
        ({"GPUREADY_SIM_SUBNET": "10.1.0.0/28"}, "is too small"),
        ({"GPUREADY_SIM_STATE": "/"}, "cannot be the state folder"),
        ({"GPUREADY_SIM_STATE": "here"}, "cannot be the state folder"),
    ],
)
def test_a_wrong_environment_is_refused_in_a_sentence(env: dict[str, str], words: str) -> None:
    with pytest.raises(SimError, match=words) as refusal:
        Sim.from_environment(env)
    assert refusal.value.code == REFUSED
    assert str(refusal.value).endswith(".")


def test_a_range_that_is_up_stays_until_down(sim: Sim) -> None:
    write_atomically(sim.state / "network.json", json.dumps({"subnet": "10.5.0.0/24", "ip_forward": "0"}))
    again = Sim.from_environment({"GPUREADY_SIM_STATE": str(sim.state)})
    assert str(again.subnet) == "10.5.0.0/24"
    with pytest.raises(SimError, match=r"differs from 10\.5\.0\.0/24"):
        Sim.from_environment({"GPUREADY_SIM_STATE": str(sim.state), "GPUREADY_SIM_SUBNET": "10.6.0.0/24"})


def test_a_folder_of_somebody_else_is_never_taken(sim: Sim) -> None:
    sim.state.mkdir()
    (sim.state / "thesis.txt").touch()
    with pytest.raises(SimError, match="not the simulation's"), sim.lock():
        pass


def test_the_lock_makes_the_folder_and_can_be_taken_again(sim: Sim) -> None:
    for _ in range(2):
        with sim.lock():
            assert sim.state.is_dir()


def test_ip_forward_is_recorded_once_and_restored(sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = tmp_path / "ip_forward"
    switch.write_text("0\n")
    quiet_run = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(network, "run", lambda *_args, **_kw: quiet_run)
    monkeypatch.setattr(network, "forward_problem", lambda _sim: None)
    sim.prepare()
    assert network.up(sim, switch)
    assert switch.read_text() == "1\n"
    assert not network.up(sim, switch)
    assert read_json(sim.state / "network.json") == {"subnet": "10.89.37.0/24", "ip_forward": "0"}
    assert "net.ipv4.ip_forward is 0 again, as before" in network.down(sim, switch)
    assert switch.read_text() == "0\n"
    assert not (sim.state / "network.json").exists()


def test_a_changed_builder_has_another_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    (recipe / "__pycache__").mkdir(parents=True)
    (recipe / "a.py").write_text("one")
    first = tree_hash([recipe])
    (recipe / "__pycache__/a.pyc").write_text("cache")
    (recipe / ".mypy_cache").mkdir()
    (recipe / ".mypy_cache/x").write_text("cache")
    assert tree_hash([recipe]) == first
    (recipe / "a.py").write_text("two")
    second = tree_hash([recipe])
    (recipe / "a.py").rename(recipe / "b.py")
    assert len({first, second, tree_hash([recipe]), tree_hash([recipe], "more")}) == 4


def test_an_image_is_keyed_by_release_and_hardware() -> None:
    keys = {image.key(Kind(suite, preset)) for suite in image.SUITES for preset in image.presets()}
    assert len(keys) == 2 * len(image.presets())
    assert {key.rpartition("-")[0] for key in keys} >= {"trixie-h100-80gb-sxm-x8", "bookworm-a100-40gb-sxm-x4"}
    with pytest.raises(SimError, match="take trixie or bookworm"):
        image.key(Kind("potato", "h100-80gb-sxm-x8"))
    with pytest.raises(SimError, match="b300 is not a hardware preset of the simulation"):
        image.key(Kind("trixie", "b300"))


def test_an_operators_own_hardware_has_an_image_of_its_own(tmp_path: Path) -> None:
    mine = tmp_path / "My Server.yaml"
    with pytest.raises(SimError, match=f"there is no file {mine}"):
        image.key(Kind("trixie", str(mine)))
    mine.write_text("gpu: t4\n")
    first = image.key(Kind("trixie", str(mine)))
    assert first.startswith("trixie-my-server-")
    mine.write_text("gpu: a30\n")
    assert image.key(Kind("trixie", str(mine))) != first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "t4-x1"], "the machine a1 exists, made from trixie-a30-x2-0123456789ab at 10.89.37.20"),
        (["--suite", "bookworm"], "the machine a1 exists, made from trixie-a30-x2-0123456789ab"),
        (["--from", "mine"], "the machine a1 exists, made from trixie-a30-x2-0123456789ab"),
        (["--address", "10.89.37.21"], "the machine a1 exists"),
        (["--from", "mine", "--preset", "a30-x2"], "the image mine has its Debian release and its hardware"),
    ],
)
def test_another_machine_of_a_name_that_exists_is_refused(
    sim: Sim, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUREADY_SIM_STATE", str(sim.state))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    record = machine.Record("a1", "10.89.37.20", "trixie-a30-x2-0123456789ab", "trixie", [])
    write_atomically(sim.state / "machines/a1.json", json.dumps(vars(record)))
    assert cli.main(["create", "a1", *words]) == REFUSED
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "suite", "preset", "kind"),
    [
        ("h100-sg-01", "", "", ("trixie", "h100-80gb-sxm-x8")),
        ("a100-la-01", "", "", ("bookworm", "a100-40gb-sxm-x4")),
        ("t4-sz-01", "", "", ("bookworm", "t4-x1")),
        ("a100-la-01", "trixie", "", ("trixie", "a100-40gb-sxm-x4")),
        ("other", "", "", ("trixie", "h100-80gb-sxm-x8")),
        ("other", "bookworm", "", ("bookworm", "a100-40gb-sxm-x4")),
        ("other", "bookworm", "h100-80gb-sxm-x8", ("bookworm", "h100-80gb-sxm-x8")),
    ],
)
def test_a_name_says_which_machine_it_is(name: str, suite: str, preset: str, kind: tuple[str, str]) -> None:
    assert servers.kind_of(name, suite, preset) == Kind(*kind)


def test_the_inventory_names_every_known_server_with_its_card() -> None:
    hosts = yaml.safe_load((CHECKOUT / "inventories/sim/hosts.yml").read_text())["all"]["children"]
    found = {
        name: (group, str(one["sim_address"])) for group, part in hosts.items() for name, one in part["hosts"].items()
    }
    assert {name: address for name, (_, address) in found.items()} == {
        name: f"10.89.37.{server.place}" for name, server in servers.KNOWN.items()
    }
    for name, (group, _) in found.items():
        declared = yaml.safe_load((CHECKOUT / f"inventories/sim/group_vars/{group}.yml").read_text())
        shown = f"{declared['gpuready_gpu_model']}-x{declared['gpuready_gpu_count']}"
        assert servers.KNOWN[name].kind.preset == shown
        of_roles = {"cuda": [key for key in declared if key.startswith("cuda_")]}
        assert check_declaration(name, declared, of_roles)[1] == []


def test_the_pool_is_sized_from_the_disk_and_refused_on_a_full_one(sim: Sim) -> None:
    assert pool.pool_size(500 * pool.GIB) == 100 * pool.GIB
    assert pool.pool_size(40 * pool.GIB) == 30 * pool.GIB
    assert pool.disk_problem(sim, 30 * pool.GIB) is None
    problem = pool.disk_problem(sim, 29 * pool.GIB)
    assert problem is not None
    assert problem.code == CANNOT
    assert "has 29.0 GiB free and the simulation needs 30 GiB" in str(problem)
    sim.prepare()
    pool.pool_file(sim).touch()
    assert pool.disk_problem(sim, 6 * pool.GIB) is None
    assert pool.disk_problem(sim, 4 * pool.GIB) is not None


def test_a_process_is_known_by_its_start_time(tmp_path: Path) -> None:
    started = process.start_time(os.getpid())
    assert process.is_same(os.getpid(), started)
    assert not process.is_same(os.getpid(), started + 1)
    assert not process.is_same(0, 0)
    assert not process.is_same(1, process.start_time(1))
    stat = tmp_path / "7" / "stat"
    stat.parent.mkdir()
    fields = " ".join(["1"] * 18)
    stat.write_text(f"7 (a ) name) S {fields} 4242 0")
    assert process.start_time(7, tmp_path) == 4242
    stat.write_text(f"7 (a ) name) Z {fields} 4242 0")
    assert process.start_time(7, tmp_path) == 0


def test_only_the_recorded_process_is_ended() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        started = process.start_time(sleeper.pid)
        assert process.end(sleeper.pid, started - 1, signal.SIGKILL, 1)
        assert process.is_same(sleeper.pid, started)
        assert process.end(sleeper.pid, started, signal.SIGKILL, 5)


@pytest.mark.parametrize(
    ("vendor", "kind", "refused"),
    [
        ("0x10de", "0x030200", True),
        ("0x10de", "0x030000", True),
        ("0x10de", "0x020000", False),
        ("0x1002", "0x030000", False),
    ],
)
def test_a_real_gpu_is_refused(tmp_path: Path, vendor: str, kind: str, refused: bool) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    problem = doctor.real_hardware_problem(tmp_path)
    assert (problem is not None) == refused
    assert problem is None or "NVIDIA hardware (PCI 0000:3b:00.0)" in str(problem)


DEB822 = """Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
"""


@pytest.mark.parametrize("form", ["deb822", "one line"])
def test_the_outside_s_mirrors_are_taken_over(tmp_path: Path, form: str) -> None:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    assert sources.host_mirrors(tmp_path) == {}
    if form == "deb822":
        (tmp_path / "apt/sources.list.d/debian.sources").write_text(DEB822)
    else:
        (tmp_path / "apt/sources.list").write_text(
            "# deb http://old.example bookworm main\n"
            "deb [arch=amd64] http://mirror.example/debian bookworm main contrib\n"
            "deb http://mirror.example/security bookworm-security main\n"
        )
    mirrors = sources.host_mirrors(tmp_path)
    assert mirrors == {"main": "http://mirror.example/debian", "security": "http://mirror.example/security"}
    lines = sources.mirror_lines("trixie", mirrors)
    assert [line.split(" ", 2)[2] for line in lines] == [
        "http://mirror.example/debian trixie main",
        "http://mirror.example/debian trixie-updates main",
        "http://mirror.example/security trixie-security main",
    ]
    assert "Suites: trixie trixie-updates\nComponents: main\n" in sources.as_deb822("\n".join(lines))
    assert sources.mirror_lines("trixie", {}) == []


def test_a_resolver_that_only_this_machine_reaches_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("nameserver 127.0.0.53\n")
    monkeypatch.setattr(sources, "RESOLVERS", (stub, real))
    assert sources.name_servers() is None
    assert "add a `nameserver` line" in str(doctor.resolver_problem())
    real.write_text("nameserver 192.0.2.53\n")
    assert sources.name_servers() == "nameserver 192.0.2.53\n"


def test_a_machine_that_is_not_there_is_named_with_the_remedy(sim: Sim) -> None:
    with pytest.raises(SimError, match=r"there is no machine a1; make it with `./scripts/gpusim create a1`\."):
        _ = machine.Machine(sim, "a1").address
    with pytest.raises(SimError, match="cannot be a machine's name"):
        machine.Machine(sim, "../a1")


def test_known_hosts_and_ssh_trust_the_recorded_keys_only(sim: Sim) -> None:
    record = machine.Record("a1", "10.89.37.20", "trixie-1", "trixie", ["ssh-ed25519 AAAA"])
    write_atomically(sim.state / "machines/a1.json", json.dumps(record.__dict__))
    identity.write_known_hosts(sim)
    assert identity.known_hosts_file(sim).read_text() == "a1,10.89.37.20 ssh-ed25519 AAAA\n"
    argv = machine.Machine(sim, "a1").ssh_argv(["echo", "two words"])
    assert "StrictHostKeyChecking=yes" in argv
    assert argv[-2:] == ["root@10.89.37.20", "echo 'two words'"]
    assert machine.Machine(sim, "a1").status() == "stopped"


def test_half_a_record_is_no_record(sim: Sim) -> None:
    file = sim.state / "machines/a1.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"name": "a1", ')
    assert not machine.Machine(sim, "a1").exists()


def test_packages_of_one_machine_reach_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt_cache, "CACHE", tmp_path)
    first = apt_cache.give("trixie", "a")
    (first / "x_1_amd64.deb").write_text("x")
    apt_cache.take_away("trixie", "a")
    second = apt_cache.give("trixie", "b")
    assert (second / "x_1_amd64.deb").read_text() == "x"
    assert not first.exists()


def test_a_program_that_fails_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SimError, match=r"ended with 3 and said: no luck") as failed:
        run(["sh", "-c", "echo first >&2; echo no luck. >&2; exit 3"], log=tmp_path / "log")
    assert failed.value.code == FAILED
    assert "first" in (tmp_path / "log").read_text()
    with pytest.raises(SimError, match="the program no-such-program is missing"):
        run(["no-such-program"])


def test_the_command_ends_with_the_refusal_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUREADY_SIM_STATE", str(tmp_path / "none"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cli.main(["stop", "a1"]) == REFUSED
    assert capsys.readouterr().err.startswith("there is no machine a1; ")
    assert cli.main(["down"]) == 0
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["list"]) == CANNOT
    assert "needs root" in capsys.readouterr().err


def test_quickstart_says_what_it_does_to_the_machine(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "lacking", lambda: ["btrfs-progs", "nftables"])
    text = "\n".join(quickstart.what_it_does(sim))
    for part in ("apt: btrfs-progs nftables", sim.bridge, "nftables table", "ip_forward", str(sim.state), ".venv"):
        assert part in text


def test_what_is_needed_is_found_or_named() -> None:
    assert "no-such-package" in packages.missing({"no-such-program": "no-such-package"})
    assert "libc" not in packages.missing({"sh": "libc"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("create", "x1", "--preset", "b300"), "b300 is not a hardware preset of the simulation"),
        (("create", "x1", "--preset", "/no/such.yaml"), "there is no file /no/such.yaml"),
        (("create", "x1", "--preset", "{wrong}"), "wrong.yaml: key description is missing"),
        (("snapshot", "x1", "kept"), "there is no machine x1"),
    ],
)
def test_what_cannot_be_made_sets_nothing_up(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("GPUREADY_SIM_STATE", str(tmp_path / "state"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("gpu: h100-80gb-sxm\n")
    assert cli.main([word.format(wrong=wrong) for word in words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
