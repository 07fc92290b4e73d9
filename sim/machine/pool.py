"""The pool: a sparse btrfs loop file in which images and machines are subvolumes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from sim.machine.common import CANNOT, FAILED, Sim, SimError, run

GIB = 2**30
NEEDED_TO_MAKE = 30 * GIB
NEEDED_TO_USE = 5 * GIB
LEFT_TO_THE_HOST = 10 * GIB
LARGEST = 100 * GIB
ROOMS = ("images", "machines", "building")


def pool_file(sim: Sim) -> Path:
    """Return the loop file."""
    return sim.state / "pool.btrfs"


def pool_size(free: int) -> int:
    """Return how large the loop file may grow, from what is free on the disk."""
    return min(LARGEST, free - LEFT_TO_THE_HOST)


def disk_free(path: Path) -> int:
    """Return the bytes that are free where the path is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def disk_problem(sim: Sim, free: int | None = None) -> SimError | None:
    """Return the refusal when the disk is too full."""
    free = disk_free(sim.state) if free is None else free
    made = pool_file(sim).exists()
    needed = NEEDED_TO_USE if made else NEEDED_TO_MAKE
    if free >= needed:
        return None
    return SimError(
        f"{sim.state} has {free / GIB:.1f} GiB free and the simulation needs {needed / GIB:.0f} GiB there",
        "free some, or name a folder on a larger disk in GPUREADY_SIM_STATE",
        CANNOT,
    )


def is_up(sim: Sim) -> bool:
    """Say whether the pool is mounted."""
    return sim.pool.is_mount()


def up(sim: Sim) -> bool:
    """Make the pool if there is none, and mount it; return whether that changed anything."""
    if is_up(sim):
        return False
    problem = disk_problem(sim)
    if problem:
        raise problem
    file = pool_file(sim)
    if not file.exists():
        _make(file, pool_size(disk_free(sim.state)))
    sim.pool.mkdir(exist_ok=True)
    done = run(["mount", "-o", "loop,noatime,discard=async", str(file), str(sim.pool)], check=False)
    if done.returncode:
        raise SimError(
            f"the pool {file} cannot be mounted: {done.stderr.strip().splitlines()[-1].rstrip('.')}",
            "this kernel needs btrfs and loop devices, see `./scripts/gpusim doctor`",
            CANNOT,
        )
    for room in ROOMS:
        (sim.pool / room).mkdir(exist_ok=True)
    return True


def _make(file: Path, size: int) -> None:
    """Make the loop file under another name first, so that a half-made one is never mounted."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    # On a btrfs host the file must not be copied on write; elsewhere this says no, which is fine.
    run(["chattr", "+C", str(new)], check=False)
    os.truncate(new, size)
    run(["mkfs.btrfs", "--quiet", "--metadata", "single", str(new)])
    new.rename(file)


def down(sim: Sim) -> None:
    """Unmount the pool; the file stays."""
    for _ in range(20):
        if not is_up(sim):
            return
        if run(["umount", str(sim.pool)], check=False).returncode == 0:
            continue
        time.sleep(0.5)
    raise SimError(
        f"the pool at {sim.pool} is still in use",
        f"leave it (`fuser -vm {sim.pool}` shows who) and run this again",
        FAILED,
    )


def is_subvolume(path: Path) -> bool:
    """Say whether the path is the top of a btrfs subvolume (they all have inode 256)."""
    return path.is_dir() and not path.is_symlink() and path.stat().st_ino == 256


def nested(sim: Sim, path: Path) -> list[Path]:
    """Return the subvolumes inside a subvolume, outermost first."""
    said = run(["btrfs", "subvolume", "list", str(sim.pool)]).stdout
    found = [sim.pool / line.split(" path ", 1)[1] for line in said.splitlines() if " path " in line]
    return sorted((entry for entry in found if path in entry.parents), key=lambda entry: len(entry.parts))


def create(path: Path) -> None:
    """Make an empty subvolume."""
    run(["btrfs", "--quiet", "subvolume", "create", str(path)])


def delete(sim: Sim, path: Path) -> None:
    """Delete a subvolume and those inside it; nothing to do is fine."""
    if not is_subvolume(path):
        return
    inside = nested(sim, path)
    for entry in [path, *inside]:
        run(["btrfs", "property", "set", "-f", "-t", "subvol", str(entry), "ro", "false"], check=False)
    for entry in [*reversed(inside), path]:
        run(["btrfs", "--quiet", "subvolume", "delete", str(entry)])


def snapshot(sim: Sim, source: Path, target: Path) -> None:
    """Copy a subvolume, with those inside it; a plain snapshot would leave these as empty folders."""
    run(["btrfs", "--quiet", "subvolume", "snapshot", str(source), str(target)])
    for entry in nested(sim, source):
        place = target / entry.relative_to(source)
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        if not place.exists():
            run(["btrfs", "--quiet", "subvolume", "snapshot", str(entry), str(place)])


def keep_image(sim: Sim, building: Path, name: str) -> Path:
    """Make a finished subvolume an image: read-only, under its name."""
    image = sim.pool / "images" / name
    # In this order: a read-only subvolume cannot be moved to another folder.
    building.rename(image)
    for entry in [*nested(sim, image), image]:
        run(["btrfs", "property", "set", "-t", "subvol", str(entry), "ro", "true"])
    return image


def scratch(sim: Sim, name: str) -> Path:
    """Return a free place to build in; what a crash left there is removed."""
    place = sim.pool / "building" / name
    delete(sim, place)
    return place


def images(sim: Sim) -> list[str]:
    """Return the names of the images, oldest first."""
    room = sim.pool / "images"
    if not room.is_dir():
        return []
    return [
        entry.name for entry in sorted(room.iterdir(), key=lambda entry: entry.stat().st_ctime) if is_subvolume(entry)
    ]
