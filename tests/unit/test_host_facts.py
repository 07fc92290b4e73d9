from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpuready.hardware import host
from gpuready.outcome import MachineCannot

SHM = "/dev/shm"

# /proc and /etc of a booted Debian 13 under systemd-nspawn on btrfs, as recorded; sshd is pid 74.
NSPAWN = {
    "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nID=debian\n',
    "proc/1/environ": "PATH=/usr/local/sbin:/usr/local/bin\0container=systemd-nspawn\0TERM=xterm\0",
    "proc/74/comm": "sshd\n",
    "proc/74/cgroup": "9:name=systemd:/system.slice/ssh.service\n8:pids:/\n0::/system.slice/ssh.service\n",
    "proc/meminfo": "MemTotal:       24683652 kB\nMemFree:         1986584 kB\nMemAvailable:   23503892 kB\n",
    "proc/net/tcp": """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 61312 1 0 100 0 0 10 0
   1: 0B00D10A:0016 0100D10A:DBC8 01 00000000:00000000 02:000AFC64 00000000     0        0 76986 3 0 20 4 14 22 -1
   2: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 61399 1 0 100 0 0 10 0
""",
    "proc/net/tcp6": """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 61314 1 0 100 0 0 10 0
   1: 00000000000000000000000001000000:2382 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 61400 1 0 100 0 0 10 0
""",  # noqa: E501
    "proc/self/mountinfo": """\
101 79 0:39 /base / rw,relatime shared:1 - btrfs /dev/loop0 rw,discard=async,space_cache=v2,subvolid=256,subvol=/base
104 101 0:44 / /dev rw,nosuid shared:4 - tmpfs tmpfs rw,size=4096k,nr_inodes=65536,mode=755
105 104 0:45 / /dev/shm rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,size=2468368k,nr_inodes=409600
110 108 254:0 /run/systemd/nspawn/propagate/exp1 /srv/old ro,relatime master:9 - ext4 /dev/vda rw,discard
111 101 259:2 / /srv/models\\040of\\040all rw,relatime - xfs /dev/nvme0n1p2 rw,attr2
112 101 259:3 / /srv/old rw,relatime - xfs /dev/nvme1n1 rw
""",
}
NSPAWN_SOCKETS = {"6": "socket:[61312]", "7": "socket:[61314]", "8": "/dev/null"}


@pytest.fixture
def nspawn(tmp_path: Path) -> Path:
    for name, text in NSPAWN.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    descriptors = tmp_path / "proc/74/fd"
    descriptors.mkdir()
    for number, target in NSPAWN_SOCKETS.items():
        (descriptors / number).symlink_to(target)
    return tmp_path


@pytest.fixture
def della(tmp_path: Path) -> Path:
    """Two Xeon Platinum 8468 of an 8 x H100 node, from its published lscpu and numactl -H: no SMT."""
    processors = "".join(
        f"processor\t: {cpu}\nmodel name\t: Intel(R) Xeon(R) Platinum 8468\nflags\t\t: fpu vme\n\n" for cpu in range(96)
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(processors, encoding="utf-8")
    for cpu in range(96):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n", encoding="ascii")
        (topology / "core_id").write_text(f"{cpu // 2}\n", encoding="ascii")
    for node, mib in ((0, 515020), (1, 516037)):
        directory = tmp_path / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(",".join(map(str, range(node, 96, 2))) + "\n", encoding="ascii")
        (directory / "meminfo").write_text(f"Node {node} MemTotal:       {mib * 1024} kB\n", encoding="ascii")
    return tmp_path


def test_processors_of_two_sockets(della: Path) -> None:
    assert host.cpu(della) == host.Cpu("Intel(R) Xeon(R) Platinum 8468", sockets=2, physical_cores=96, logical_cores=96)


def test_numa_nodes_of_two_sockets(della: Path) -> None:
    assert host.numa_nodes(della) == (
        host.NumaNode(0, tuple(range(0, 96, 2)), 515020 * 1024**2),
        host.NumaNode(1, tuple(range(1, 96, 2)), 516037 * 1024**2),
    )


def test_ranges_of_processors_are_read(della: Path) -> None:
    # As on the 8 x H100 server of github.com/NVIDIA/nccl/issues/1264.
    (della / "sys/devices/system/node/node0/cpulist").write_text("0-55,112-167\n", encoding="ascii")
    nodes = host.numa_nodes(della)

    assert nodes is not None
    assert nodes[0].cpus == (*range(56), *range(112, 168))


def test_a_kernel_that_tells_no_topology_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 243.75\n\nprocessor\t: 1\n", encoding="ascii")

    assert host.cpu(tmp_path) == host.Cpu(model=None, sockets=None, physical_cores=None, logical_cores=2)
    assert host.system(tmp_path).hypervisor is None


def test_an_empty_root_is_unknown_and_not_zero(tmp_path: Path) -> None:
    facts = host.facts(["/srv"], tmp_path)

    assert facts.cpu == host.Cpu()
    assert facts.memory == host.Memory(total_bytes=None, available_bytes=None)
    assert facts.numa_nodes is None
    assert facts.nvme_drives is None
    assert facts.filesystems == ()
    assert facts.shared_memory is None
    assert facts.listening_ports is None
    assert facts.simulated_machine is None
    assert facts.system.distribution is None
    assert facts.system.container is None


def test_memory_is_in_bytes(nspawn: Path) -> None:
    assert host.memory(nspawn) == host.Memory(total_bytes=24683652 * 1024, available_bytes=23503892 * 1024)


def test_listening_ports_have_their_program(nspawn: Path) -> None:
    assert host.listening_ports(nspawn) == (
        host.ListeningPort("0.0.0.0", 22, 74, "sshd"),
        host.ListeningPort("::", 22, 74, "sshd"),
        host.ListeningPort("127.0.0.1", 8000, None, None),
        host.ListeningPort("::1", 9090, None, None),
    )


def test_the_unit_of_a_process_is_named(nspawn: Path) -> None:
    assert host.unit(74, nspawn) == "ssh.service"
    assert host.unit(75, nspawn) is None
    assert host.program(75, nspawn) is None


@pytest.mark.parametrize(
    ("path", "mount_point", "device", "kind"),
    [
        ("/", "/", "/dev/loop0", "btrfs"),
        ("/opt/gpuready/engines/not/yet/there", "/", "/dev/loop0", "btrfs"),
        (SHM, SHM, "tmpfs", "tmpfs"),
        (f"{SHM}em", "/dev", "tmpfs", "tmpfs"),
        ("/srv/models of all/llama@main", "/srv/models of all", "/dev/nvme0n1p2", "xfs"),
        ("/srv/old", "/srv/old", "/dev/nvme1n1", "xfs"),
    ],
)
def test_a_path_is_on_the_mount_nearest_above_it(
    nspawn: Path, path: str, mount_point: str, device: str, kind: str
) -> None:
    for directory in ("dev/shm", "dev/shmem", "srv/models of all", "srv/old"):
        (nspawn / directory).mkdir(parents=True)
    found = host.filesystem(path, nspawn)

    assert found is not None
    assert (found.path, found.mount_point, found.device, found.type) == (path, mount_point, device, kind)


def test_root_s_reserve_is_not_free(nspawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # statvfs of an ext4 with a reserve for root: f_bfree is more than f_bavail.
    recorded = os.statvfs_result((4096, 4096, 66053021, 49397806, 9942513, 16777216, 16269203, 16269203, 4096, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: recorded)
    found = host.filesystem("/", nspawn)

    assert found is not None
    assert (found.total_bytes, found.free_bytes) == (270553174016, 40724533248)


def test_a_link_leads_to_the_filesystem_of_its_target(nspawn: Path) -> None:
    (nspawn / "dev/shm").mkdir(parents=True)
    (nspawn / "srv").mkdir()
    (nspawn / "srv/models").symlink_to("../dev/shm")
    found = host.filesystem("/srv/models/llama", nspawn)

    assert found is not None
    assert found.mount_point == SHM


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ValueError, match="srv/models is not an absolute path"):
        host.filesystem("srv/models")


def test_nvme_drives_without_the_paths_of_a_multipath_drive(tmp_path: Path) -> None:
    # 7501476528 sectors of 512 bytes are a 3.84 TB drive; the kernel counts so whatever the drive's sectors.
    for name, sectors in (
        ("nvme10n1", 7501476528),
        ("nvme2n1", 7501476528),
        ("nvme0c0n1", 1),
        ("sda", 1),
        ("loop0", 8),
    ):
        device = tmp_path / "sys/block" / name / "device"
        device.mkdir(parents=True)
        (device.parent / "size").write_text(f"{sectors}\n", encoding="ascii")
        (device / "model").write_text("SAMSUNG MZQL23T8HCLS-00A07              \n", encoding="ascii")

    assert host.nvme_drives(tmp_path) == (
        host.NvmeDrive("nvme2n1", 3840755982336, "SAMSUNG MZQL23T8HCLS-00A07"),
        host.NvmeDrive("nvme10n1", 3840755982336, "SAMSUNG MZQL23T8HCLS-00A07"),
    )


def test_the_system_and_what_it_runs_in(nspawn: Path) -> None:
    system = host.system(nspawn)

    assert (system.distribution, system.distribution_version) == ("debian", "13")
    assert system.container == "systemd-nspawn"


def test_docker_leaves_a_file(nspawn: Path) -> None:
    (nspawn / "proc/1/environ").write_text("PATH=/usr/bin\0", encoding="ascii")
    assert host.system(nspawn).container == "none"

    (nspawn / ".dockerenv").touch()
    assert host.system(nspawn).container == "docker"


def test_the_marker_of_a_simulated_machine(tmp_path: Path) -> None:
    assert host.simulated_machine(tmp_path) is None
    marker = tmp_path / "etc/gpuready-simulated-machine"
    marker.parent.mkdir()
    marker.write_text(json.dumps({"builder": "gpuready sim/machine", "image": "debian-13"}), encoding="utf-8")

    assert host.simulated_machine(tmp_path) == {"builder": "gpuready sim/machine", "image": "debian-13"}


@pytest.mark.parametrize("text", ["", "{", "[]", '"yes"', "\udcff"])
def test_a_damaged_marker_is_no_marker_and_no_real_server(tmp_path: Path, text: str) -> None:
    marker = tmp_path / "etc/gpuready-simulated-machine"
    marker.parent.mkdir()
    marker.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(MachineCannot) as caught:
        host.simulated_machine(tmp_path)
    assert caught.value.failures[0].code == "simulation-marker"


# From here on: this machine, against the distribution's own tools.


def output(*command: str) -> list[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")


def test_processors_as_lscpu_counts_them() -> None:
    rows = [line.split(",") for line in output("lscpu", "-p=CPU,CORE,SOCKET") if not line.startswith("#")]
    cpu = host.cpu()

    assert cpu.logical_cores == len(rows)
    assert cpu.physical_cores == len({core for _, core, _ in rows})
    assert cpu.sockets == len({socket_ for _, _, socket_ in rows})


def test_memory_as_free_counts_it() -> None:
    total = int(output("free", "-b")[1].split()[1])

    assert host.memory().total_bytes == total


@pytest.mark.parametrize("path", ["/", SHM, "/usr/bin/env", "/proc"])
def test_filesystems_as_df_shows_them(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"this machine has no {path}")
    target, source, kind, size = output("df", "-B1", "--output=target,source,fstype,size", path)[1].split()
    found = host.filesystem(path)

    assert found is not None
    assert (found.mount_point, found.type, found.total_bytes) == (target, kind, int(size))
    assert Path(found.device).resolve() == Path(source).resolve()
    assert found.free_bytes is not None
    assert 0 <= found.free_bytes <= int(size)


def test_a_path_that_is_not_there_yet_is_on_its_parent_s_filesystem(tmp_path: Path) -> None:
    there, later = host.filesystem(str(tmp_path)), host.filesystem(str(tmp_path / "a/b/c"))

    assert there is not None
    assert later is not None
    assert (later.path, later.mount_point, later.total_bytes) == (
        str(tmp_path / "a/b/c"),
        there.mount_point,
        there.total_bytes,
    )


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_our_own_listening_port_is_found_with_our_pid(address: str, family: socket.AddressFamily) -> None:
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with server:
        port = server.getsockname()[1]
        found = [one for one in host.listening_ports() or () if one.port == port]

    program = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert found == [host.ListeningPort(address, port, os.getpid(), program)]


def test_the_running_system() -> None:
    system = host.system()

    assert system.kernel == os.uname().release
    assert system.architecture == os.uname().machine
    assert system.python == sys.version.split()[0]
