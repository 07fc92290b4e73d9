"""A whole virtual machine with disks that have serials, a kernel of its own that mounts NFS, and a power switch.

qemu emulates it without acceleration: its processor is some twenty times slower than this one. Its image is a blank
Debian with the stand-in hardware of a simulated server, so that playbooks run against it, too; a drop-in lets that
hardware show in this machine, which is no container.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sim.machine import sources
from sim.machine.common import CHECKOUT, tree_hash
from sim.machine.image import MARKER, MASKED, PACKAGES

CACHE = CHECKOUT / ".cache/vm"
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "ganesha.nfsd": "nfs-ganesha-vfs"}
"""What is needed here, each with its Debian package."""
SUITE, PRESET = "trixie", "h100-80gb-sxm-x8"
_SYSTEM = ("udev", "linux-image-cloud-amd64", "initramfs-tools", "zstd", "e2fsprogs", "xfsprogs")
_BOOT_SECONDS = 180
_HARDWARE = ("sim/hardware", "sim/nvml", "sim/engines")


def ensure_image() -> Path:
    """Return the folder with kernel, initrd, disk.img and key; build it where there is none of this recipe."""
    recipe = [Path(__file__), *(CHECKOUT / name for name in _HARDWARE), *sources.host_cas()]
    folder = CACHE / tree_hash(recipe, sources.apt_settings())
    if not folder.is_dir():
        shutil.rmtree(CACHE, ignore_errors=True)
        building = CACHE / "building"
        building.mkdir(parents=True)
        _build(building)
        building.rename(folder)
    return folder


def _build(folder: Path) -> None:
    root = folder / "root"
    include = ",".join((*PACKAGES, *_SYSTEM))
    mirrors = sources.mirror_lines(SUITE, sources.host_mirrors())
    words = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={include}", "--components=main", SUITE]
    _run([*words, str(root), *mirrors])
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")])
    _run([str(CHECKOUT / ".venv/bin/python"), "sim/hardware/install.py", "--preset", PRESET, "--root", str(root)])
    standins = sorted(one.name for one in (root / "usr/lib/gpuready-standin/engines").iterdir())
    for name, text in {
        MARKER: json.dumps({"builder": "gpuready tests/vm", "image": folder.name, "standins": standins}),
        "root/.ssh/authorized_keys": (folder / "key.pub").read_text(),
        "etc/systemd/network/10-vm.network": "[Match]\nName=e*\n[Network]\nDHCP=yes\n",
        "etc/systemd/system/gpuready-standin-hardware.service.d/vm.conf": "[Unit]\nConditionVirtualization=\n",
        "etc/resolv.conf": "nameserver 10.0.2.3\n",
        "etc/dpkg/dpkg.cfg.d/unsafe-io": "force-unsafe-io\n",
        "etc/hostname": "vm\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    settings = sources.apt_settings()
    if settings:
        (root / "etc/apt/apt.conf.d/80outside").write_text(settings)
    (root / "root/.ssh").chmod(0o700)
    with (root / "etc/initramfs-tools/modules").open("a") as file:
        file.write("virtio_blk\nvirtio_net\n")
    sources.copy_host_cas(root)
    _run(["systemctl", f"--root={root}", "--quiet", "enable", "systemd-networkd.service"])
    _run(["systemctl", f"--root={root}", "--quiet", "mask", *MASKED])
    _run(["chroot", str(root), "update-initramfs", "-u", "-k", "all"])
    for name, pattern in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copy(next((root / "boot").glob(pattern)), folder / name)
    disk = folder / "disk.img"
    _run(["truncate", "--size=40G", str(disk)])
    _run(["mke2fs", "-q", "-t", "ext4", "-L", "vmroot", "-d", str(root), str(disk)])
    shutil.rmtree(root)


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"


@dataclass
class Disk:
    """A disk that the machine has beside its own."""

    serial: str
    bus: str = "virtio-blk-pci"
    """A device of qemu: virtio-blk-pci, nvme or scsi-hd."""
    size: str = "4G"
    made_by: Sequence[str] = ()
    """The program that puts something on it; without one it is blank."""


@dataclass
class VirtualMachine:
    """One machine, whose disks lie in `folder`."""

    folder: Path
    disks: Sequence[Disk]
    image: Path = field(default_factory=ensure_image)
    _qemu: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        _run(["cp", "--sparse=always", str(self.image / "disk.img"), str(self.folder / "system.img")])
        for disk in self.disks:
            _run(["truncate", f"--size={disk.size}", str(self.file(disk.serial))])
            if disk.made_by:
                _run([*disk.made_by, str(self.file(disk.serial))])

    def file(self, serial: str) -> Path:
        """Return the file that is a disk's content."""
        return self.folder / f"{serial or 'none'}.img"

    def start(self) -> None:
        """Switch it on and wait until ssh answers."""
        words = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"]
        words += ["-m", "1536", "-nographic", "-no-reboot", "-device", "virtio-scsi-pci"]
        words += ["-kernel", str(self.image / "kernel"), "-initrd", str(self.image / "initrd")]
        words += ["-append", "root=LABEL=vmroot rw console=ttyS0 quiet"]
        words += ["-drive", f"if=virtio,format=raw,file={self.folder / 'system.img'}"]
        words += ["-nic", f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{self.port}-:22"]
        for index, disk in enumerate(self.disks):
            words += ["-drive", f"if=none,id=d{index},format=raw,file={self.file(disk.serial)}"]
            words += ["-device", f"{disk.bus},drive=d{index}" + (f",serial={disk.serial}" if disk.serial else "")]
        with (self.folder / "console.log").open("ab") as console:
            self._qemu = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        limit = time.monotonic() + _BOOT_SECONDS
        while self.ssh("true", check=False, timeout=20).returncode:
            assert self._qemu.poll() is None, (self.folder / "console.log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < limit, (self.folder / "console.log").read_text(errors="replace")[-2000:]
            time.sleep(1)
        # ssh answers before all else is up, and before systemd knows that it is still starting.
        self.ssh("systemctl start gpuready-standin-hardware.service multi-user.target", check=False)

    def pull_the_plug(self) -> None:
        """Take its power away; what its disks were given is on them."""
        if self._qemu is not None:
            self._qemu.send_signal(signal.SIGKILL)
            self._qemu.wait()
            self._qemu = None

    def ssh_options(self) -> list[str]:
        """Return what ssh needs to reach it."""
        words = ["-i", str(self.image / "key"), "-p", str(self.port), "-o", "StrictHostKeyChecking=no"]
        return [*words, "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=10"]

    def ssh(
        self, command: str, stdin: str = "", *, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root."""
        try:
            done = subprocess.run(
                ["ssh", *self.ssh_options(), "root@127.0.0.1", command],
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess([], 124, "", f"no end within {timeout} s")
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def put(self, source: Path, target: str) -> None:
        """Copy a file to it."""
        options = ["-P" if one == "-p" else one for one in self.ssh_options()]
        _run(["scp", "-q", *options, str(source), f"root@127.0.0.1:{target}"])
