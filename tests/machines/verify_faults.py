"""For each test of tests/verify: what is done to a finished server so that just this one fails, and how that is undone.

Both are shell, run on the server as root.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE = "/var/lib/gpuready"
ENGINE = "gpuready-engine@chat.0.service"
GATEWAY = "gpuready-gateway.service"
FILES = "/etc/gpuready/gateway/current"
MODEL = "/srv/models/gpuready-sim--*"
VENV = "/opt/gpuready/engines/vllm-*"
GPU = "/sys/bus/pci/devices/0000:1b:00.0"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    test: str
    """The test that must fail; those that depend on it are not judged."""
    plant: str
    undo: str
    words: str
    """What its sentence must say."""
    quick: bool = False
    """Whether the default run plants it."""


def away(path: str) -> tuple[str, str]:
    """Move a file away, and back."""
    return f"mv {path} /root/away", f"mv /root/away {path}"


def longer(path: str, line: str = "# a change by hand") -> tuple[str, str]:
    """Append a line to a file, and take it away."""
    return f"echo '{line}' >> {path}", f"sed -i '$d' {path}"


def drop_in(unit: str, setting: str) -> tuple[str, str]:
    """Change a setting of a unit by a drop-in."""
    folder = f"/etc/systemd/system/{unit}.d"
    return (
        f"mkdir {folder}; printf '[Service]\\n{setting}\\n' > {folder}/fault.conf; systemctl daemon-reload",
        f"rm -r {folder}; systemctl daemon-reload",
    )


def listener(unit: str, port: int) -> tuple[str, str]:
    """Have a process of a unit listen on every address."""
    code = f'import socket, time; s = socket.create_server(("", {port})); time.sleep(600)'
    group = f"/sys/fs/cgroup$(systemctl show {unit} --property ControlGroup --value)"
    return (
        f"setsid python3 -c '{code}' < /dev/null > /dev/null 2>&1 & echo $! > /run/fault.pid; "
        f'cat /run/fault.pid > "{group}/cgroup.procs"; '
        f"for i in $(seq 50); do ss -Hltn | grep -q :{port} && break; sleep 0.1; done",
        "kill $(cat /run/fault.pid); rm /run/fault.pid",
    )


def tell_haproxy(command: str) -> str:
    """Say a command to the running HAProxy, as an operator may do with socat."""
    return (
        "python3 -c 'import socket, sys; s = socket.socket(socket.AF_UNIX); "
        's.connect("/run/gpuready-gateway/admin.sock"); '
        f's.sendall(b"{command}\\n"); said = s.recv(4096).decode().strip(); sys.exit(said or 0)\''
    )


RELOAD = f"kill -USR2 $(systemctl show {GATEWAY} --property MainPID --value); sleep 2"
HALF = (
    "mkdir -p /root/half/DEBIAN; cd /root/half/DEBIAN; "
    "printf 'Package: half\\nVersion: 1\\nArchitecture: all\\nMaintainer: nobody\\nDescription: half\\n' > control; "
    "printf '#!/bin/sh\\nexit 1\\n' > postinst; chmod 755 postinst; "
    "dpkg-deb --build /root/half /root/half.deb; dpkg --install /root/half.deb || true"
)
REJECT = (
    "nft add table inet fault; nft 'add chain inet fault out { type filter hook output priority 0; }'; "
    "nft add rule inet fault out tcp dport 18100 reject with tcp reset"
)
# What somebody opened, and had confirmed.
CONFIRMED = f"{STATE}/firewall.json"
OPENED = (
    f"cp {CONFIRMED} /root/away; nft insert rule inet gpuready output tcp dport 18100 accept; "
    "nft --stateless list table inet gpuready | python3 -c 'import json, sys; "
    f'known = json.load(open("{CONFIRMED}")); known["table"] = sys.stdin.read(); '
    f'json.dump(known, open("{CONFIRMED}", "w"))\''
)
CLOSED_AGAIN = f"cp /root/away {CONFIRMED}; rm /root/away; nft -f /etc/gpuready/firewall.nft"
CUT = (
    f"cd {MODEL}; mv model.safetensors /srv/whole; "
    "head -c 700000 /srv/whole > model.safetensors; chmod 444 model.safetensors"
)

FAULTS = (
    Fault("test_the_server_is_finished", *away(f"{STATE}/plan.json"), "plan.json is not there"),
    Fault(
        "test_the_server_part_is_whole",
        "printf x >> $(readlink -f /opt/gpuready/gpuready.pyz)",
        "truncate -s -1 $(readlink -f /opt/gpuready/gpuready.pyz)",
        "has the digest",
    ),
    Fault("test_the_command_answers", *away("/usr/local/bin/gpuready"), "gpuready deployment status does not answer"),
    Fault(
        "test_the_engines_user_cannot_log_in",
        "usermod --shell /bin/bash gpuready-engine",
        "usermod --shell /usr/sbin/nologin gpuready-engine",
        "the shell /bin/bash",
    ),
    Fault(
        "test_recorded_packages_are_installed",
        "dpkg --remove numactl",
        "dpkg --install /var/cache/apt/archives/numactl_*.deb",
        "numactl is absent",
    ),
    Fault(
        "test_no_package_is_half_installed",
        HALF,
        "dpkg --purge half; rm -r /root/half*",
        "half is install ok half-configured",
    ),
    Fault(
        "test_recorded_files_are_unchanged",
        *longer("/etc/security/limits.d/60-gpuready.conf"),
        "/etc/security/limits.d/60-gpuready.conf was changed",
        quick=True,
    ),
    Fault("test_recorded_files_are_unchanged", *away("/etc/sysctl.d/60-gpuready.conf"), "60-gpuready.conf is missing"),
    Fault(
        "test_recorded_kernel_parameters_are_in_force",
        "echo 7200 > /proc/sys/net/ipv4/tcp_keepalive_time",
        "echo 120 > /proc/sys/net/ipv4/tcp_keepalive_time",
        "net.ipv4.tcp_keepalive_time is 7200, not 120",
    ),
    Fault(
        "test_shared_memory_is_as_large_as_declared",
        "mount -o remount,size=64m /dev/shm",
        "mount -o remount,size=50% /dev/shm",
        "/dev/shm has 0.1 GiB",
    ),
    # A container has no clock of its own, so the record is made to name a service that is not there.
    Fault(
        "test_time_is_kept",
        f"""sed -i 's/"clock": null/"clock": "chrony.service"/' {STATE}/host.json""",
        f"""sed -i 's/"clock": "chrony.service"/"clock": null/' {STATE}/host.json""",
        "chrony.service is inactive and not there",
    ),
    Fault(
        "test_the_packet_filter_is_loaded",
        "nft delete table inet gpuready",
        "nft --file /etc/gpuready/firewall.nft",
        "the kernel has no table inet gpuready",
    ),
    Fault(
        "test_the_packet_filter_is_loaded",
        "nft add rule inet gpuready input tcp dport 9 accept",
        "nft --file /etc/gpuready/firewall.nft",
        "is not what was confirmed",
    ),
    Fault(
        "test_the_packet_filter_comes_back_at_boot",
        "systemctl disable gpuready-firewall.service",
        "systemctl enable gpuready-firewall.service",
        "gpuready-firewall.service is active and disabled",
    ),
    Fault(
        "test_no_packet_filter_is_on_trial",
        "mkdir -p /run/gpuready/firewall; touch /run/gpuready/firewall/pending.nft",
        "rm /run/gpuready/firewall/pending.nft",
        "pending.nft is there",
    ),
    Fault(
        "test_no_unit_that_counts_has_failed",
        "systemd-run --quiet --unit=gpuready-fault false; sleep 0.5",
        "systemctl reset-failed gpuready-fault.service",
        "gpuready-fault.service has failed",
    ),
    Fault(
        "test_records_and_doors_are_guarded",
        f"chmod 644 {STATE}/plan.json",
        f"chmod 640 {STATE}/plan.json",
        "plan.json is 0644 root:root, not 0640 root:root",
        quick=True,
    ),
    Fault(
        "test_nothing_is_left_of_an_interrupted_run",
        "mkdir /srv/models/.model@1.abcdef; mkdir /opt/gpuready/engines/vllm-0-000000000000",
        "rmdir /srv/models/.model@1.abcdef /opt/gpuready/engines/vllm-0-000000000000",
        "/opt/gpuready/engines/vllm-0-000000000000 is there, /srv/models/.model@1.abcdef is there",
    ),
    Fault(
        "test_the_planned_gpus_are_on_the_bus",
        f"echo 0x8086 > {GPU}/vendor",
        f"echo 0x10de > {GPU}/vendor",
        "7 GPUs of NVIDIA are on the PCI bus",
    ),
    Fault("test_the_cuda_toolkit_is_the_recorded_one", *away("/usr/bin/nvcc"), "/usr/bin/nvcc is silent"),
    Fault(
        "test_engine_environments_are_whole",
        *longer(f"$(echo {VENV}/lib/python3*/site-packages/vllm/version.py)"),
        "1 files of /opt/gpuready/engines/vllm-",
    ),
    Fault(
        "test_engines_python_has_the_planned_version",
        f"cd {VENV}/bin; mv python /root/away; ln -s /bin/false python",
        f"cd {VENV}/bin; mv /root/away python",
        "/bin/python does not run as gpuready-engine (exit 1)",
    ),
    Fault("test_models_are_complete", CUT, f"mv /srv/whole {MODEL}/model.safetensors", "has 700000 bytes instead of"),
    Fault(
        "test_models_cannot_be_written_by_the_engines",
        f"chmod o+w {MODEL}/config.json",
        f"chmod o-w {MODEL}/config.json",
        "config.json can be written by gpuready-engine",
    ),
    Fault("test_replicas_run", f"systemctl stop {ENGINE}", f"systemctl start {ENGINE}", f"{ENGINE} is inactive (dead)"),
    Fault(
        "test_replicas_start_at_boot",
        f"systemctl disable {ENGINE}",
        f"systemctl enable {ENGINE}",
        f"{ENGINE} is disabled",
    ),
    Fault(
        "test_replicas_run_the_recorded_release",
        *longer(f"{STATE}/replicas/chat/0/current/serve.yaml"),
        f"of {ENGINE} was changed since it was started",
    ),
    Fault(
        "test_replicas_run_the_recorded_release",
        "mkdir -p /run/gpuready/.trial; echo '{}' > /run/gpuready/.trial/chat.0",
        "rm /run/gpuready/.trial/chat.0",
        f"{ENGINE} is on trial",
    ),
    Fault(
        "test_replicas_are_boxed_in",
        *drop_in("gpuready-engine@.service", "NoNewPrivileges=no"),
        f"{ENGINE} has NoNewPrivileges=no",
    ),
    Fault("test_engines_listen_on_loopback_only", *listener(ENGINE, 19999), f"{ENGINE} listens on 0.0.0.0:19999"),
    Fault("test_engines_answer_no_people_of_the_server", OPENED, CLOSED_AGAIN, f"{ENGINE} says connected to nobody"),
    Fault("test_engines_generate", REJECT, "nft delete table inet fault", "chat.0 gave no token", quick=True),
    # It is active, and silent as a busy one would be, but its counters stand still.
    Fault(
        "test_engines_generate",
        f"systemctl kill --signal=STOP {ENGINE}",
        f"systemctl kill --signal=CONT {ENGINE}",
        "chat.0 gave no token (no answer within 25 s)",
    ),
    Fault(
        "test_engines_have_the_planned_kv_cache",
        f"""sed -i 's/"kv_bytes": 67108864/"kv_bytes": 33554432/' {STATE}/plan.json""",
        f"""sed -i 's/"kv_bytes": 33554432/"kv_bytes": 67108864/' {STATE}/plan.json""",
        "chat.0 has a KV cache of 131,072 tokens instead of 65,409 to 65,536",
    ),
    Fault(
        "test_the_gateway_runs",
        f"systemctl stop {GATEWAY}",
        f"systemctl start {GATEWAY}",
        f"{GATEWAY} is inactive (dead)",
    ),
    Fault(
        "test_the_gateway_starts_at_boot",
        f"systemctl disable {GATEWAY}",
        f"systemctl enable {GATEWAY}",
        f"{GATEWAY} is disabled",
    ),
    Fault(
        "test_the_gateways_configuration_is_accepted",
        *longer(f"{FILES}/haproxy.cfg", "nonsense"),
        "unknown keyword 'nonsense'",
    ),
    Fault(
        "test_the_gateway_runs_what_is_on_disk",
        *longer(f"{FILES}/haproxy.cfg"),
        "were changed by hand",
        quick=True,
    ),
    Fault(
        "test_the_gateway_is_boxed_in",
        *drop_in(GATEWAY, "PrivateDevices=no"),
        f"{GATEWAY} has PrivateDevices=no",
    ),
    Fault(
        "test_the_gateway_listens_only_where_planned",
        *listener(GATEWAY, 19998),
        f"{GATEWAY} listens on 0.0.0.0:19998",
    ),
    Fault(
        "test_the_gateway_lists_the_planned_models",
        f"cp -a {FILES}/models.json /root/; sed -i 's/tiny-qwen2/other/' {FILES}/models.json; {RELOAD}; "
        f"cp -a /root/models.json {FILES}/",
        RELOAD,
        "GET /v1/models lists gpuready-sim/other",
    ),
    Fault(
        "test_the_gateway_refuses_an_unknown_model",
        tell_haproxy("add map models.map gpuready-verify/no-such-model deployment_chat"),
        tell_haproxy("del map models.map gpuready-verify/no-such-model"),
        "was answered with HTTP 404 and code 404",
    ),
    Fault(
        "test_the_gateway_generates",
        tell_haproxy("disable server deployment_chat/chat.0"),
        tell_haproxy("enable server deployment_chat/chat.0"),
        "chat through the gateway gave no token (HTTP 503)",
    ),
)  # fmt: skip
