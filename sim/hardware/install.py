#!/usr/bin/env python3
"""Puts stand-in GPU hardware into the root of a simulated machine.

    .venv/bin/python sim/hardware/install.py --root ROOT --preset h100-80gb-sxm-x8

The machine then has a libnvidia-ml.so.1 that answers from /var/lib/gpuready-standin/gpus.conf, and a unit that,
at boot, makes the dynamic linker find that library first, lays a PCI tree over /sys/bus/pci/devices and the
driver's lines over /proc/devices and /proc/modules. The library has a directory of its own because Debian's
libnvidia-ml1, which comes with the CUDA toolkit, owns the usual place. For what has no call in NVML there are a
program, gpus-standin, and a stand-in nvidia-smi, which Debian's own replaces where it is installed. What an engine
lacks on a CPU lies in usr/lib/gpuready-standin/engines, a folder for each stand-in.

Running it again changes nothing. It needs gcc and the checkout's .venv, nothing else, and never installs into a
running system: ROOT is a directory other than /. The unit does nothing outside a container, nor where there is
real NVIDIA hardware.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # as `-m sim.hardware.install` in the checkout

from sim.hardware.refusal import RefusalError

HERE = Path(__file__).resolve().parent
SIM = HERE.parent
SOURCES = SIM / "nvml"
ENGINES = SIM / "engines"
FILES = HERE / "files"

COMPILER = "gcc"
PROGRAM_FLAGS = (
    "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wpedantic", "-Werror",
)  # fmt: skip
FLAGS = (*PROGRAM_FLAGS, "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1")

LIBRARY = "libnvidia-ml-standin.so"
PROGRAM = "gpus-standin"
SMI = "usr/bin/nvidia-smi"
STATE = "var/lib/gpuready-standin/gpus.conf"
HOME = "usr/lib/gpuready-standin"
LINKER = "etc/ld.so.conf.d/00-gpuready-standin.conf"  # sorts before the distribution's own directories
UNIT = "gpuready-standin-hardware.service"
ENGINES_UNIT = "gpuready-standin-engines.service"
ENGINES_WANTED = f"etc/systemd/system/multi-user.target.wants/{ENGINES_UNIT}"
DRIVER_FILES = ("character-devices", "modules")
PYTHON = ("sim/hardware/state_file.py", "sim/hardware/engines_standin.py")


class Install(NamedTuple):
    """What a described server puts into a root: the PCI tree and the state file."""

    tree: dict[str, bytes | Path]
    state: str


def describe(preset: str, machine: str, driver: bool = True) -> Install:
    """Compile a preset, or an operator's own file of that form."""
    # Here, because what reads YAML is only in the checkout's own environment, and its absence is said in a sentence.
    try:
        from sim.hardware.describe import load_server
        from sim.hardware.pci import render_tree
        from sim.hardware.state_text import render_state
    except ModuleNotFoundError as missing:
        raise RefusalError(
            f"the Python module {missing.name} is missing; run ./scripts/setup, and this with .venv/bin/python"
        ) from None
    server = load_server(preset)
    return Install(render_tree(server, driver), render_state(server, machine))


def compiler_says(option: str) -> str:
    """Ask the compiler something about itself."""
    try:
        return subprocess.run([COMPILER, option], check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        raise RefusalError(f"{COMPILER} is missing; install it (apt-get install gcc libc6-dev)") from None


def compile_library(cache: Path) -> Path:
    """Compile the stand-in of NVIDIA's library."""
    return _compile(cache, LIBRARY, FLAGS, sorted(SOURCES.glob("*.c")))


def compile_program(cache: Path) -> Path:
    """Compile the program that does what has no call in NVML: boot, reset, check."""
    return _compile(cache, PROGRAM, PROGRAM_FLAGS, [*sorted(SOURCES.glob("*.c")), *sorted(SOURCES.glob("tools/*.c"))])


def _compile(cache: Path, name: str, flags: tuple[str, ...], sources: list[Path]) -> Path:
    """Compile, or take from the cache what the same sources, flags and compiler made."""
    digest = hashlib.sha256(
        "\0".join([*flags, compiler_says("-dumpfullversion"), compiler_says("-dumpmachine")]).encode()
    )
    for source in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    target = cache / f"{digest.hexdigest()[:16]}-{name}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / name
        command = [COMPILER, *flags, "-o", str(made), *(str(source) for source in sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RefusalError(f"{COMPILER} could not compile the stand-in: {done.stderr.strip()}")
        made.replace(target)
    return target


def engine_files() -> dict[str, bytes | Path]:
    """Return the stand-ins of what engines lack on a CPU, by path: a folder of Python's search path for each."""
    return {str(path.relative_to(ENGINES)): path.read_bytes() for path in sorted(ENGINES.rglob("*.py"))}


class Installer:
    """Writes into a root only what differs, and remembers what it wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed: list[str] = []

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write one file, unless it is there already with this content and mode."""
        target = self.root / path
        if (
            target.is_file()
            and not target.is_symlink()
            and target.read_bytes() == content
            and target.stat().st_mode & 0o777 == mode
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(content)
        new.chmod(mode)
        new.replace(target)
        self.changed.append(path)

    def link(self, path: str, to: str) -> None:
        """Make one symbolic link."""
        target = self.root / path
        if target.is_symlink() and os.readlink(target) == to:  # noqa: PTH115 - Path.readlink, but for the text alone
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(to)
        self.changed.append(path)

    def tree(self, path: str, files: dict[str, bytes | Path]) -> None:
        """Make a directory hold exactly these files, and where a path stands for the content a link to it."""
        target = self.root / path
        present = {
            str(p.relative_to(target)): p.readlink() if p.is_symlink() else p.read_bytes()
            for p in (target.rglob("*") if target.is_dir() else ())
            if p.is_symlink() or p.is_file()
        }
        if present == files:
            return
        if target.exists():
            shutil.rmtree(target)
        for name, content in files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                file.symlink_to(content)
            else:
                file.write_bytes(content)
        self.changed.append(path)

    def remove(self, path: str) -> None:
        """Remove one file or link, if it is there."""
        target = self.root / path
        if target.exists() or target.is_symlink():
            target.unlink()
            self.changed.append(path)


def check_root(root: Path) -> None:
    """Refuse a root that is not a machine's or that is this running system."""
    if not (root / "etc").is_dir() or not (root / "usr").is_dir():
        raise RefusalError(f"{root} is not the root of a machine (no etc and usr in it)")
    if root.resolve() == Path("/"):
        raise RefusalError(
            "the stand-in hardware is never installed into a running system;"
            " give the root directory of a simulated machine"
        )


def is_foreign(smi: Path) -> bool:
    """Return whether another nvidia-smi than our stand-in is there: Debian's package takes its place, and keeps it."""
    ours = smi.is_symlink() and os.readlink(smi) == f"/{HOME}/nvidia-smi-standin"  # noqa: PTH115 - for the text alone
    return not ours and (smi.exists() or smi.is_symlink())


def _install_driver(installer: Installer, state: str, library: Path, program: Path) -> None:
    """Install what a server with a driver has more than one without."""
    for name in DRIVER_FILES:
        installer.file(f"{HOME}/{name}", (FILES / name).read_bytes())
    installer.file(STATE, state.encode())
    installer.file(f"{HOME}/lib/{LIBRARY}", library.read_bytes())
    installer.link(f"{HOME}/lib/libnvidia-ml.so.1", LIBRARY)
    installer.file(LINKER, f"/{HOME}/lib\n".encode())
    installer.file(f"{HOME}/{PROGRAM}", program.read_bytes(), 0o755)
    installer.file(f"{HOME}/nvidia-smi-standin", (FILES / "nvidia-smi-standin").read_bytes(), 0o755)
    if not is_foreign(installer.root / SMI):
        installer.link(SMI, f"/{HOME}/nvidia-smi-standin")
    for name in PYTHON:
        installer.file(f"{HOME}/python/{name}", (SIM.parent / name).read_bytes())
    installer.file(f"etc/systemd/system/{ENGINES_UNIT}", (FILES / ENGINES_UNIT).read_bytes())
    installer.link(ENGINES_WANTED, f"../{ENGINES_UNIT}")


def _remove_driver(installer: Installer) -> None:
    """Remove what _install_driver installs."""
    if not is_foreign(installer.root / SMI):
        installer.remove(SMI)
    of_home = (*DRIVER_FILES, "lib/libnvidia-ml.so.1", f"lib/{LIBRARY}", PROGRAM, "nvidia-smi-standin")
    python = tuple(f"python/{name}" for name in PYTHON)
    places = (LINKER, STATE, f"etc/systemd/system/{ENGINES_UNIT}", ENGINES_WANTED)
    for path in (*places, *(f"{HOME}/{name}" for name in (*of_home, *python))):
        installer.remove(path)


def machine_name(root: Path, given: str | None, preset: str) -> str:
    """Return the name that the GPUs' UUIDs follow from: what was given, else the root's hostname, else the preset's."""
    hostname = root / "etc/hostname"
    found = hostname.read_text(encoding="utf-8").strip() if hostname.is_file() else ""
    name = given if given is not None else found or Path(preset).stem
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise RefusalError(f"{name!r} cannot be a machine's name: take up to 64 letters, digits, dots and dashes")
    return name


def install(root: Path, preset: str, machine: str | None, cache: Path, driver: bool) -> list[str]:
    """Install a preset into a root and return what was changed, as paths relative to the root."""
    check_root(root)
    hardware = describe(preset, machine_name(root, machine, preset), driver)
    library = compile_library(cache)
    program = compile_program(cache)

    installer = Installer(root)
    installer.tree(f"{HOME}/pci", hardware.tree)
    installer.tree(f"{HOME}/engines", engine_files())
    installer.file(f"{HOME}/hardware-standin", (FILES / "hardware-standin").read_bytes(), 0o755)
    installer.file(f"etc/systemd/system/{UNIT}", (FILES / UNIT).read_bytes())
    installer.link(f"etc/systemd/system/sysinit.target.wants/{UNIT}", f"../{UNIT}")
    if driver:
        _install_driver(installer, hardware.state, library, program)
    else:
        _remove_driver(installer)
    return installer.changed


def main() -> int:
    """Run the command."""
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuready" / "standin"
    parser = argparse.ArgumentParser(description="Put stand-in GPU hardware into the root of a simulated machine.")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--root", type=Path, help="root directory of the machine, never /")
    target.add_argument("--check", action="store_true", help="only say whether the description is a good one")
    parser.add_argument("--preset", required=True, help="name of a file in presets/, or the path of your own such file")
    parser.add_argument(
        "--machine", help="name that UUIDs and serial numbers follow from (default: etc/hostname in the root)"
    )
    parser.add_argument(
        "--no-driver",
        dest="driver",
        action="store_false",
        help="PCI devices only, as on a server without a driver",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache,
        help="where the compiled library is kept (default: %(default)s)",
    )
    options = parser.parse_args()
    # Engines, which are no root on the machine, read what lies there.
    os.umask(0o022)
    try:
        if options.check:
            describe(options.preset, "check")
            return 0
        changed = install(options.root, options.preset, options.machine, options.cache, options.driver)
    except RefusalError as refusal:
        print(f"install.py: {refusal}.", file=sys.stderr)
        return 2
    for path in changed:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
