"""The host under what serves: our part on it, packages, settings, packet filter, and what lies about."""

from __future__ import annotations

import re

import pytest
from tests.verify.server import Server

OURS = re.compile(r"(gpuready|nvidia)-.*|(nftables|ssh|sshd)\.(service|socket)")
"""Units of ours, and those that we rely on; the recorded clock is another."""
NO_LOGIN = ("/usr/sbin/nologin", "/sbin/nologin", "/bin/false", "/usr/bin/false")


def test_the_server_is_finished(server: Server) -> None:
    server.demand_answer()


def test_the_server_part_is_whole(server: Server) -> None:
    part = server.topic("server_part")
    named = str(part["name"]).removeprefix("gpuready-").removesuffix(".pyz")
    if part["digest"] is None or not part["digest"].startswith(named) or len(named) != 16:
        found = f"/opt/gpuready/{part['name']} has the digest {str(part['digest'])[:16]}"
        server.fail(found, "a file whose name tells its digest")


@pytest.mark.depends_on("test_the_server_part_is_whole")
def test_the_command_answers(server: Server) -> None:
    part = server.topic("server_part")
    if not part["runs"]:
        server.fail(f"gpuready deployment status does not answer ({part['said']})", "a result in JSON")


def test_the_engines_user_cannot_log_in(server: Server) -> None:
    user = server.topic("user")
    if not user:
        server.fail("there is no user gpuready-engine", "the user of the engines")
    if user["uid"] == 0 or user["shell"] not in NO_LOGIN:
        server.fail(f"gpuready-engine has uid {user['uid']} and the shell {user['shell']}", "a user that cannot log in")


def test_recorded_packages_are_installed(server: Server) -> None:
    states = server.topic("packages")["states"]
    # A package on hold is installed, too.
    found = [f"{name} is {state}" for name, state in states.items() if not state.endswith(" ok installed")]
    server.demand(found, "an installed package")


def test_no_package_is_half_installed(server: Server) -> None:
    packages = server.topic("packages")
    found = [f"{name} is {state}" for name, state in packages["broken"].items()]
    server.demand(
        found or [packages["audit"][:200]] * bool(packages["audit"]),
        "nothing that dpkg --audit complains of",
        "run dpkg --configure -a on the server",
    )


def test_recorded_files_are_unchanged(server: Server) -> None:
    recorded = server.recorded("files")
    now = server.topic("files")
    found = [
        f"{path} {'was changed' if now[path] else 'is missing'}" for path in recorded if now[path] != recorded[path]
    ]
    server.demand(found, "the file as it was placed")


def test_recorded_kernel_parameters_are_in_force(server: Server) -> None:
    recorded = server.recorded("parameters")
    now = server.topic("parameters")
    found = [
        f"{key} is {now[key]}, not {value}"
        for key, value in recorded.items()
        if now[key] != " ".join(str(value).split())
    ]
    server.demand(found, "the value that was applied")


def test_shared_memory_is_as_large_as_declared(server: Server) -> None:
    percent = server.recorded("shm_percent")
    if percent is None:
        pytest.skip(f"{server.name} leaves /dev/shm alone (base_shm_percent is null)")
    memory = server.topic("memory")
    if memory["shm"] < memory["ram"] * percent / 100 * 0.98:
        server.fail(
            f"/dev/shm has {memory['shm'] / 2**30:.1f} GiB", f"{percent} % of {memory['ram'] / 2**30:.1f} GiB of RAM"
        )


def test_time_is_kept(server: Server) -> None:
    name = server.recorded("clock")
    clock = server.topic("clock")
    if name is None and clock["container"]:
        pytest.skip(f"{server.name} is a container ({clock['container']}), its host keeps the time")
    if name is None:
        server.fail("no time service was recorded", "one that keeps the clock")
    if clock["ActiveState"] != "active" or clock["UnitFileState"] != "enabled":
        found = f"{name} is {clock['ActiveState']} and {clock['UnitFileState'] or 'not there'}"
        server.fail(found, "an active and enabled unit")


def demand_firewall(server: Server) -> None:
    if not server.recorded("firewall"):
        pytest.skip(f"{server.name} leaves the packet filter alone (base_firewall_enabled is false)")


def test_the_packet_filter_is_loaded(server: Server) -> None:
    firewall = server.topic("firewall")
    demand_firewall(server)
    if not firewall["loaded"]:
        server.fail("the kernel has no table inet gpuready", "the packet filter that was confirmed")
    if not firewall["as_recorded"]:
        server.fail("the kernel's table inet gpuready is not what was confirmed", "the recorded rules")


def test_the_packet_filter_comes_back_at_boot(server: Server) -> None:
    firewall = server.topic("firewall")
    demand_firewall(server)
    state = firewall["unit"]
    if (state["ActiveState"], state["UnitFileState"]) != ("active", "enabled"):
        found = f"gpuready-firewall.service is {state['ActiveState']} and {state['UnitFileState']}"
        server.fail(found, "an active and enabled unit")
    if not firewall["file_as_recorded"]:
        server.fail("/etc/gpuready/firewall.nft is not what was confirmed", "the recorded rules")


def test_no_packet_filter_is_on_trial(server: Server) -> None:
    trial = server.topic("firewall")["trial"]
    server.demand([f"{one} is there" for one in trial], "no rules that wait to be confirmed or taken back")


def test_no_unit_that_counts_has_failed(server: Server) -> None:
    failed = server.topic("failed_units")
    ours = [name for name in failed if OURS.fullmatch(name) or name == server.recorded("clock")]
    step = "see systemctl status and journalctl -u of it on the server"
    server.demand([f"{name} has failed" for name in ours], "no failed unit", step)
    if failed:
        pytest.skip(f"{server.name} has failed units that gpuready does not rely on: {', '.join(failed)}; {step}")


def wanted_access(path: str) -> str:
    """Return mode, owner and group that a path shall have; releases hold flags: only root and the engines read them."""
    if path.startswith("/var/lib/gpuready/releases/") and path.count("/") >= 6:
        return f"{'0640' if path.count('/') > 6 else '0750'} root:gpuready-engine"
    if path.endswith("/plan.json"):
        return "0640 root:root"
    return "0600 root:root" if path.endswith(".sock") else "0755 root:root"


def test_records_and_doors_are_guarded(server: Server) -> None:
    found = [
        f"{path} is {now}, not {wanted_access(path)}"
        for path, now in server.topic("access").items()
        if now != wanted_access(path)
    ]
    server.demand(found, "the modes and owners that gpuready gave")


def test_nothing_is_left_of_an_interrupted_run(server: Server) -> None:
    found = [f"{path} is there" for path in server.topic("leftovers")]
    server.demand(found, "nothing half-built", f"{server.run_site}, and remove what is still there then")
