"""The roles' own variables: types, ranges, formats and contradictions, in one place and said with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuready.operations import firewall_rules, packages
from gpuready.operations.machine import Done, Machine
from gpuready.outcome import Refusal
from gpuready.spec.declared import Declared
from gpuready.spec.inventory import role_defaults, role_options
from gpuready.spec.knobs import RULES
from gpuready.spec.values import Secret

ROLES = Path(__file__).resolve().parents[2] / "roles"


def sentences(**variables: Any) -> list[str]:
    _, failures = Declared(ROLES, "h1", variables, locate=lambda keys: f"g.yml:{len(keys)}").all_knobs()
    return [failure.sentence() for failure in failures]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"base_lock_seconds": 0}, "base_lock_seconds = 0 is refused: allowed are 1 to 86400"),
        ({"base_lock_seconds": True}, "base_lock_seconds = true is refused: allowed is a whole number"),
        ({"base_lock_seconds": "\uff11"}, r"base_lock_seconds = '\uff11' is refused: allowed is a whole number"),
        ({"base_shm_percent": 96}, "base_shm_percent = 96 is refused: allowed are 1 to 95, or null"),
        ({"base_packages": "nftables,vim"}, "base_packages = 'nftables,vim' is refused: allowed is a list"),
        ({"base_packages": ["nftables", "a b"]}, "base_packages[1] = 'a b' is refused: allowed are names of Debian"),
        (
            {"base_packages": ["nftables", "libc6:i386"]},
            "base_packages[1] = 'libc6:i386' is refused: allowed are names of",
        ),
        ({"cuda_packages": ["cuda:amd64"]}, "of Debian packages, of the server's own architecture"),
        ({"base_firewall_enabled": "false"}, "base_firewall_enabled = 'false' is refused: allowed is true or false"),
        ({"base_sysctl": {"a b": 1}}, "base_sysctl['a b'] = 1 is refused: allowed are names such as net.core"),
        ({"base_sysctl": {"net.x": 1.5}}, "base_sysctl['net.x'] = 1.5 is refused: allowed is a whole number"),
        ({"base_firewall_open": [{}]}, "base_firewall_open[0].port is not set"),
        ({"base_firewall_open": [{"prot": 1}]}, "base_firewall_open[0].prot: no such key; did you mean proto?"),
        ({"base_limits": [{"domain": "*", "type": "x", "item": "as", "value": 1}]}, "allowed are soft, hard, -"),
        ({"cuda_version": 12.8}, "cuda_version = 12.8 is refused: allowed is a text (YAML reads it as a number: quote"),
        ({"engines_index_url": "https://me:pw@x y"}, "engines_index_url is refused: allowed is an address with"),
        ({"gateway_port": 18100}, "gateway_port = 18100 is refused: allowed are 1 to 18099"),
        ({"gateway_body_limit_kib": 0}, "gateway_body_limit_kib = 0 is refused: allowed are 16 to 65536"),
        ({"gateway_bind": "::1%lo"}, "gateway_bind = '::1%lo' is refused: allowed is * or an IPv4 or IPv6 address"),
        ({"models_mount": {"fstype": "nfs"}}, "models_mount.source is not set"),
        (
            {"models_mount": {"source": "nas"}},
            "models_mount.source = 'nas' is refused: allowed is a share",
        ),
        ({"models_mount": {"source": "/dev/sdb1"}}, "or a filesystem as UUID=... or LABEL=..."),
        ({"models_mount": {"source": "nas:/m", "fstype": "cifs"}}, "allowed is one of nfs, nfs4, ext4, xfs"),
        (
            {"models_mount": {"source": "nas:/m", "fstype": "xfs"}},
            "of nas:/m it is one of nfs, nfs4",
        ),
        ({"models_mount": {"source": "LABEL=m", "fstype": "nfs"}}, "of LABEL=m it is one of ext4, xfs"),
        (
            {"models_mount": {"source": "nas:/m", "options": "ro, hard"}},
            "allowed are options of mount(8)",
        ),
        ({"models_mount": {"source": "nas:/m", "size": 1}}, "models_mount.size: no such key"),
        (
            {"models_disk": {"serial": 12345}},
            "models_disk.serial = 12345 is refused: allowed is a text (YAML",
        ),
        ({"models_disk": {"serial": " S1"}}, "serial = ' S1' is refused: allowed is a disk's serial, as lsblk"),
        ({"models_disk": {"fstype": "xfs"}}, "models_disk.serial is not set"),
        (
            {"models_disk": {"serial": "S1", "fstype": "btrfs"}},
            "allowed is one of ext4, xfs",
        ),
        (
            {"models_disk": {"serial": "S1"}, "models_mount": {"source": "nas:/m"}},
            "models_mount is set, too, and the store has one filesystem: remove one",
        ),
        ({"gateway_bind": Secret("hidden")}, "gateway_bind = (from a vault, not shown) is refused"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_place(variables: dict[str, Any], words: str) -> None:
    found = sentences(**variables)
    assert any(words in one for one in found), found
    assert all(one.startswith("host h1, g.yml:") for one in found)
    assert not any("hidden" in one or "pw" in one for one in found)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"base_packages": ["vim"]}, "base_packages = ['vim'] is refused: the packet filter needs nftables"),
        ({"gateway_port": 22}, "gateway_port = 22 is refused: SSH is on this port"),
        ({"gateway_port": "2222", "ansible_port": 2222}, "gateway_port = '2222' is refused: SSH is on this port"),
        ({"cuda_version": "12.4", "cuda_packages": ["cuda-toolkit-12-8"]}, "cuda_packages[0] = 'cuda-toolkit-12-8'"),
        (
            {
                "base_limits": [
                    {"domain": "*", "type": "soft", "item": "nofile", "value": 9},
                    {"domain": "*", "type": "hard", "item": "nofile", "value": 8},
                ]
            },
            "base_limits[0].value = 9 is refused: the hard limit of nofile for * is 8",
        ),
    ],
)
def test_values_that_contradict_each_other(variables: dict[str, Any], words: str) -> None:
    (sentence,) = sentences(**variables)
    assert words in sentence


def test_what_is_good_is_left_alone() -> None:
    good = {
        "base_shm_percent": None,
        "base_firewall_enabled": False,
        "base_packages": ["vim"],
        "base_sysctl": {"net.core.somaxconn": None, "net.ipv4.tcp_rmem": "4096 1 2"},
        "base_firewall_open": [{"port": "9100-9110", "source": ["10.0.0.1/8", "::1"]}, {"port": 53, "proto": "udp"}],
        "gateway_port": "9000",
        "cuda_packages": role_defaults(ROLES, "cuda")["cuda_packages"],
    }
    assert sentences(**good) == []


def test_only_the_role_asked_for_is_judged() -> None:
    declared = Declared(ROLES, "h1", {"base_packages": ["vim"], "gateway_port": 0})
    assert [one.what for one in declared.one_role("gateway")] == ["host h1, gateway_port = 0 is refused"]
    (only,) = Declared(ROLES, "h1", {"base_packages": ["vim"]}).one_role("base")
    assert "base_packages" in only.what
    assert Declared(ROLES, "h1", {"base_packages": ["vim"]}).one_role("gateway") == []


def test_every_rule_is_of_a_variable_that_exists() -> None:
    known = {name for options in role_options(ROLES).values() for name in options}
    assert {name.split(".")[0] for name in RULES} <= known


@pytest.mark.parametrize("port", [1, "65535", "9100-9110", "9110-9100", 0, 65536, "x", "1-2-3", "", "-1", "80 ", None])
@pytest.mark.parametrize(
    "source", [None, "10.0.0.1/8", ["::1", "fe80::/10"], "10.0.0.0/33", "here", ["10.0.0.0/8", "x"]]
)
def test_the_server_and_the_controller_judge_an_opening_alike(port: object, source: object) -> None:
    opening = {"port": port, "source": source}
    try:
        firewall_rules.wanted_from({"open": [opening]})
        on_server = True
    except Refusal:
        on_server = False
    assert (sentences(base_firewall_open=[opening]) == []) == on_server


@pytest.mark.parametrize("name", ["g++-12", "libc6", "0ad", "libc6:i386", "cuda:amd64", "vim=2", "Vim", "-y", "a b"])
def test_the_server_and_the_controller_judge_a_package_alike(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, lambda _: Done(0, f"{name}\tinstalled\t1\n", ""))
    machine.write("/usr/bin/apt-get", "")
    try:
        packages.ensure(machine, packages.Wanted([name]), check=True)
        on_server = True
    except Refusal:
        on_server = False
    assert (sentences(base_packages=["nftables", name]) == []) == on_server


def test_true_and_false_of_the_command_line_are_what_they_say_and_of_a_file_are_texts() -> None:
    values = {"base_firewall_enabled": "false", "gateway_port": "8081"}
    given, failures = Declared(ROLES, "h1", values, command_line=values).knobs("base")
    assert (given, failures) == ({"base_firewall_enabled": False}, [])
    _, (failure,) = Declared(ROLES, "h1", values).knobs("base")
    assert "base_firewall_enabled = 'false' is refused: allowed is true or false" in failure.sentence()
    shared = {"gpuready_replan": "yes"}
    _, said = Declared(ROLES, "h1", shared, command_line=shared).shared()
    assert not any("replan" in one.what for one in said)
    _, said = Declared(ROLES, "h1", shared).shared()
    assert any("gpuready_replan = 'yes' is refused: allowed are true and false" in one.sentence() for one in said)
