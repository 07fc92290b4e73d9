"""What happens to simulated GPUs beside NVML's calls: boot, reset, list, check; all of it under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sim.hardware import install, state_file
from sim.hardware.state_file import State
from tests.unit.standin import state, with_lines

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
SCRIPT = install.FILES / "nvidia-smi-standin"
NOBODY = 65534


@dataclass(frozen=True)
class Gpus:
    """The program with the state file that it works on."""

    program: Path
    file: Path

    def run(self, *arguments: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GPUREADY_STANDIN_STATE": str(self.file)}
        command = [str(self.program), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, user=user)

    def state(self) -> State:
        return state_file.read(self.file)

    def set(self, index: int, **values: object) -> None:
        with state_file.change(self.file) as changed:
            for key, value in values.items():
                changed.gpus[index].set(key, str(value))

    def add(self, index: int, key: str, value: str) -> None:
        with state_file.change(self.file) as changed:
            changed.gpus[index].add(key, value)

    def refuses(self, code: int, sentence: str, *arguments: str) -> None:
        """Assert that a call is refused with this sentence and changes nothing."""
        before = self.file.read_bytes()
        done = self.run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"gpus-standin: {sentence}.\n")
        assert self.file.read_bytes() == before


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sanitized") / install.PROGRAM
    sources = [str(source) for pattern in ("*.c", "tools/*.c") for source in sorted(install.SOURCES.glob(pattern))]
    command = [install.COMPILER, *install.PROGRAM_FLAGS, *SANITIZERS, "-o", str(target), *sources]
    subprocess.run(command, check=True)
    return target


def gpus_of(text: str, program: Path, place: Path) -> Gpus:
    file = place / "gpus.conf"
    file.write_text(text)
    return Gpus(program, file)


@pytest.fixture
def h100(program: Path, tmp_path: Path) -> Gpus:
    return gpus_of(state("h100-80gb-sxm-x8"), program, tmp_path)


@pytest.fixture
def holder() -> Iterator[int]:
    """Give the id of a process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


INSTANCE = ("mig_current = 1", "mig_pending = 1", "gpu_instance = 2 2 4 1", "compute_instance = 2 0 2 0 2")

# ---- boot ----


def test_a_boot_loses_what_a_reboot_of_hopper_loses(program: Path, tmp_path: Path, holder: int) -> None:
    lines = (*INSTANCE, f"process = {holder} 1048576 compute 2 0", "ecc_volatile_uncorrected = 4", "compute_mode = 3")
    gpus = gpus_of(with_lines(state("h100-80gb-sxm-x8"), 3, *lines), program, tmp_path)
    assert gpus.run("boot").returncode == 0
    gpu = gpus.state().gpus[3]
    assert (gpu.number("mig_current"), gpu.number("mig_pending"), gpu.all("gpu_instance")) == (0, 0, [])
    assert (gpu.all("process"), gpu.number("ecc_volatile_uncorrected"), gpu.number("compute_mode")) == ([], 0, 0)


def test_what_is_counted_since_the_driver_loaded_begins_again_and_what_is_kept_stays(
    program: Path, tmp_path: Path
) -> None:
    since_load = ["ecc_volatile_corrected", "violation_thermal_nanoseconds", "energy_millijoules", "pcie_replays"]
    since_load += ["nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_crc_errors"]
    kept = ("ecc_aggregate_corrected", "remapped_uncorrectable", "temperature_celsius")
    text = with_lines(state(), 0, *(f"{key} = 7" for key in (*since_load, *kept)), "violation_power_nanoseconds = -")
    gpus = gpus_of(text, program, tmp_path)
    assert gpus.run("boot").returncode == 0
    gpu = gpus.state().gpus[0]

    assert {key: gpu.number(key) for key in since_load} == dict.fromkeys(since_load, 0)
    assert {key: gpu.number(key) for key in kept} == dict.fromkeys(kept, 7)
    assert gpu.number("violation_power_nanoseconds") is None


def test_a_boot_of_ampere_keeps_the_mode_and_loses_the_instances(program: Path, tmp_path: Path) -> None:
    text = with_lines(state("a100-80gb-sxm-x8"), 0, *INSTANCE)
    gpus = gpus_of(with_lines(text, 1, "mig_pending = 1"), program, tmp_path)
    assert gpus.run("boot").returncode == 0
    modes = [(gpu.number("mig_current"), gpu.all("gpu_instance")) for gpu in gpus.state().gpus[:3]]
    assert modes == [(1, []), (1, []), (0, [])]


def test_a_boot_takes_away_the_faults_that_end_with_it(program: Path, tmp_path: Path) -> None:
    faults = "".join(f"\n[fault {until} 1]\nuntil = {until}\nthrottle_reasons = 8\n" for until in ("clear", "reboot"))
    gpus = gpus_of(state("h100-80gb-sxm-x8") + faults, program, tmp_path)
    assert gpus.run("boot").returncode == 0
    assert [fault.title for fault in gpus.state().faults] == ["fault clear 1"]


def test_a_boot_says_what_is_wrong_with_a_damaged_file(program: Path, tmp_path: Path) -> None:
    gpus = gpus_of("gpuready-standin 1\n", program, tmp_path)
    gpus.refuses(1, f"{gpus.file}: line 1: not `gpuready-standin 2`", "boot")


# ---- reset ----


def test_gpus_are_reset_by_number_uuid_and_bus_id(h100: Gpus) -> None:
    for index in range(8):
        h100.set(index, ecc_volatile_uncorrected=7)
    uuid = h100.state().gpus[3].get("uuid")
    done = h100.run("reset", "0", f"{uuid},00000000:DF:00.0", "0000:9d:00.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "GPU 0 (0000:1b:00.0) was reset.",
        "GPU 3 (0000:61:00.0) was reset.",
        "GPU 4 (0000:9d:00.0) was reset.",
        "GPU 7 (0000:df:00.0) was reset.",
    ]
    assert [gpu.number("ecc_volatile_uncorrected") for gpu in h100.state().gpus] == [0, 7, 7, 0, 0, 7, 7, 0]


def test_without_a_name_all_are_reset(h100: Gpus) -> None:
    done = h100.run("reset")
    assert (done.returncode, done.stdout.count(" was reset.")) == (0, 8)


@pytest.mark.parametrize("name", ["8", "", "0,", "GPU-0", "0000:ff:00.0", "-1"])
def test_a_name_that_no_gpu_has_is_refused(h100: Gpus, name: str) -> None:
    asked = name.split(",")[-1]
    sentence = f"reset: no GPU here is called `{asked}`; it is a number below 8, a UUID or a PCI bus id"
    h100.refuses(6, sentence, "reset", name)


def test_who_uses_a_gpu_is_named_and_no_other_is_reset(h100: Gpus, holder: int) -> None:
    h100.add(2, "process", f"{holder} 1048576 compute - -")
    sentence = f"reset: GPU 2 (0000:52:00.0) is in use by process {holder}: end it first"
    h100.refuses(19, sentence, "reset", "0,2")
    assert h100.run("reset", "0").returncode == 0


@pytest.mark.parametrize(
    ("key", "value", "code", "reason"),
    [
        ("held_by_module", "nvidia_drm", 19, "is held by the kernel module nvidia_drm: unload it first"),
        ("lost", 1, 15, "has fallen off the bus: only a reboot or a power cycle brings it back"),
        ("reset_stuck", 1, 255, "does not come back from its reset: only a reboot helps"),
    ],
)
def test_what_else_prevents_a_reset(h100: Gpus, key: str, value: object, code: int, reason: str) -> None:
    h100.set(5, **{key: value})
    h100.refuses(code, f"reset: GPU 5 (0000:c3:00.0) {reason}", "reset")


def test_before_ampere_all_that_nvlink_joins_is_reset_at_once(program: Path, tmp_path: Path) -> None:
    """Three in a row, one of them joined with nothing but its neighbour, and a fourth alone."""
    text = state("v100s-32gb-x4")
    addresses = [gpu.get("pci_address") for gpu in state_file.parse(text).gpus]
    text = with_lines(text, 0, f"nvlink = 0 gpu {addresses[1]}")
    text = with_lines(text, 1, f"nvlink = 0 gpu {addresses[0]}", f"nvlink = 1 gpu {addresses[2]}")
    gpus = gpus_of(with_lines(text, 2, f"nvlink = 0 gpu {addresses[1]}"), program, tmp_path)
    sentence = "reset: GPUs that NVLink joins are reset by one command here: add {} to it"
    gpus.refuses(2, sentence.format("1,2"), "reset", "0")
    gpus.refuses(2, sentence.format("1"), "reset", "0,2")
    assert gpus.run("reset", "0,1,2").returncode == 0
    assert gpus.run("reset", "3").returncode == 0


@pytest.mark.parametrize(("preset", "code"), [("a100-80gb-sxm-x8", 2), ("h100-80gb-sxm-x8", 0)])
def test_only_an_ampere_nvswitch_needs_its_fabric_manager(
    program: Path, tmp_path: Path, preset: str, code: int
) -> None:
    gpus = gpus_of(state(preset), program, tmp_path)
    assert gpus.run("reset", "0").returncode == 0
    for index in range(8):
        gpus.set(index, fabric_state=1)
    assert gpus.run("reset", "0").returncode == code
    assert gpus.run("reset").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be become by root")
def test_only_root_resets(h100: Gpus) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        program = shutil.copy(h100.program, place)
        gpus = Gpus(Path(program), Path(shutil.copy(h100.file, place)))
        done = gpus.run("reset", "0", user=NOBODY)
    assert (done.returncode, done.stderr) == (4, "gpus-standin: reset: only root may reset a GPU.\n")


def test_a_damaged_file_is_said_once(program: Path, tmp_path: Path) -> None:
    gpus = gpus_of("gpuready-standin 2\nnonsense\n", program, tmp_path)
    for verb in ("reset", "list"):
        done = gpus.run(verb)
        sentence = f"libnvidia-ml-standin: {gpus.file}: line 2: neither a section nor `key = value`.\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


# ---- list, check, and the wrong word ----


def test_the_list_names_gpus_and_mig_devices(program: Path, tmp_path: Path) -> None:
    text = with_lines(state("h100-80gb-sxm-x8"), 1, *INSTANCE)
    gpus = gpus_of(with_lines(text, 2, "lost = 1"), program, tmp_path)
    done = gpus.run("list")
    uuids = [gpu.get("uuid") for gpu in gpus.state().gpus]
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 9)
    assert lines[1] == f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {uuids[1]})"
    assert lines[2].startswith("  MIG device 0: NVIDIA H100 80GB HBM3 MIG 3g.40gb (UUID: MIG-")
    assert lines[3] == "GPU 2: GPU is lost"


def test_a_file_is_checked_by_name(h100: Gpus, tmp_path: Path) -> None:
    assert h100.run("check", str(h100.file)).returncode == 0
    wrong = tmp_path / "wrong.conf"
    wrong.write_text(with_lines(h100.file.read_text(), 1, "pci_address = here"))
    h100.refuses(1, f"{wrong}: gpu 1: pci_address = here is no PCI address", "check", str(wrong))
    h100.refuses(1, f"{tmp_path}/none: cannot be opened: No such file or directory", "check", f"{tmp_path}/none")


def test_what_is_no_regular_file_is_refused_at_once(h100: Gpus, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for other in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        h100.refuses(1, f"{other}: is no regular file", "check", str(other))


WITH_MIG = {"mig_current": "1", "mig_pending": "1"}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("mig_slots = 8", "mig_slots = 0", "a GPU with MIG profiles needs mig_current, mig_pending and mig_slots"),
        ("profile = 0 19 1 ", "profile = 0 19 9 ", "profile 1g.10gb has more than 8 slices"),
        ("mig_slots = 8", "mig_slots = 7", "profile 1g.20gb goes beyond the slots, mig_slots"),
        ("mig_pending = 1", "mig_pending = 2", "mig_current and mig_pending are 0 or 1, on a GPU with MIG profiles"),
        ("pcie_width = 16", "pcie_width = 32", "pcie_width is from 1 to pcie_width_max"),
        ("pcie_generation = 5", "pcie_generation = 0", "pcie_generation is from 1 to pcie_generation_max"),
        (
            "\n\n[gpu 1]",
            "\ngpu_instance = 0 4 0 1\ncompute_instance = 0 0 0 3 2\ncompute_instance = 0 1 0 3 3\n\n[gpu 1]",
            "compute instance 1 of GPU instance 0 does not fit",
        ),
    ],
)
def test_what_would_lead_a_call_astray_is_refused(
    h100: Gpus, tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    text, wrong = state("h100-80gb-sxm-x8", **WITH_MIG), tmp_path / "wrong.conf"
    assert old in text
    wrong.write_text(text.replace(old, new, 1))
    h100.refuses(1, f"{wrong}: gpu 0: {sentence}", "check", str(wrong))


def test_a_gpu_without_profiles_has_no_mig_mode(h100: Gpus, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.conf"
    wrong.write_text(with_lines(state("t4-x1"), 0, "mig_current = 1"))
    sentence = "gpu 0: mig_current and mig_pending are 0 or 1, on a GPU with MIG profiles"
    h100.refuses(1, f"{wrong}: {sentence}", "check", str(wrong))


@pytest.mark.parametrize("arguments", [(), ("restart",), ("boot", "now"), ("check",), ("list", "all")])
def test_a_wrong_call_is_told_the_right_ones(h100: Gpus, arguments: tuple[str, ...]) -> None:
    h100.refuses(2, "call it as: boot | reset [INDEX|UUID|BUS ID ...] | list | check FILE", *arguments)


# ---- the stand-in nvidia-smi ----


def smi(gpus: Gpus, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "GPUREADY_STANDIN_STATE": str(gpus.file),
        "GPUREADY_STANDIN_PROGRAM": str(gpus.program),
    }
    return subprocess.run(["sh", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("-r", "-i", "3,4"), ("--gpu-reset", "--id=3,4"), ("-i=3,4", "-r")])
def test_it_resets_and_says_that_it_is_a_stand_in(h100: Gpus, arguments: tuple[str, ...]) -> None:
    done = smi(h100, *arguments)
    assert done.returncode == 0
    assert done.stdout == "GPU 3 (0000:61:00.0) was reset.\nGPU 4 (0000:9d:00.0) was reset.\n"
    assert done.stderr == "nvidia-smi: a stand-in, the GPUs of this machine are simulated.\n"


def test_it_exits_as_the_reset_does(h100: Gpus) -> None:
    h100.set(1, held_by_module="nvidia_drm")
    assert smi(h100, "--gpu-reset").returncode == 19


def test_it_lists_the_gpus(h100: Gpus) -> None:
    assert smi(h100, "-L").stdout == h100.run("list").stdout


@pytest.mark.parametrize("arguments", [(), ("-q",), ("mig", "-lgi"), ("-r", "-i"), ("-L", "-i", "0"), ("-i", "0")])
def test_all_else_is_refused_with_what_to_do(h100: Gpus, arguments: tuple[str, ...]) -> None:
    done = smi(h100, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith("apt-get install --no-install-recommends nvidia-smi.\n")
