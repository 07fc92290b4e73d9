"""The command ./scripts/gpusim where no machine is needed: run, show, set, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim.gpusim import keys, planting, run
from sim.gpusim import main as cli
from sim.gpusim.faults import FAULTS
from sim.hardware import state_file
from sim.machine import doctor, servers
from sim.machine.common import CANNOT, REFUSED
from tests.unit.standin import CHECKOUT

GPUSIM = CHECKOUT / "scripts/gpusim"
COUNT = (
    "import pynvml as n; n.nvmlInit()\n"
    "print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(0)))\n"
)


def gpusim(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(GPUSIM), *words], capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two A30."""
    made = tmp_path / "a30"
    made.mkdir()
    (made / "gpus.conf").write_text(run.compiled("a30-x2", "test"), encoding="ascii")
    return made


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a verb about the folder's hardware; give exit code, output and error."""

    def called(verb: str, *words: str) -> tuple[int, str, str]:
        code = cli.main([verb, "--state", str(folder), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


# ---- run ----


def test_a_command_sees_the_simulated_gpus_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    done = gpusim("run", "--preset", "a30-x2", "--", sys.executable, "-c", f"{COUNT}raise SystemExit(7)")
    assert (done.returncode, done.stdout) == (7, "2 NVIDIA A30\n"), done.stderr


def test_a_folder_keeps_the_hardware_for_the_next_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "mine")
    ask = ["--", sys.executable, "-c", COUNT]
    assert gpusim("run", "--state", folder, "--preset", "t4-x1", *ask).stdout == "1 Tesla T4\n"
    assert gpusim("set", "--state", folder, "name=Tesla X4").returncode == 0
    assert gpusim("run", "--state", folder, *ask).stdout == "1 Tesla X4\n"
    again = gpusim("run", "--state", folder, "--preset", "t4-x1", *ask)
    assert (again.returncode, again.stdout) == (REFUSED, "")
    assert again.stderr == f"{folder} holds a simulated server already; leave out --preset.\n"


def test_a_gpu_can_be_reset_where_there_is_no_nvidia_smi(folder: Path) -> None:
    done = gpusim(
        "run", "--state", str(folder), "--", "/bin/sh", "-c", "PATH=/usr/bin:/bin:${PATH##*:}; nvidia-smi -r -i 0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "GPU 0 (0000:3b:00.0) was reset.\n"


def test_who_is_not_root_may_change_that_hardware(folder: Path) -> None:
    assert state_file.read(folder / "gpus.conf").system.get("root_only") == "0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "a31", "--", "true"], "there is no preset 'a31'; known are: "),
        (["--preset", "./none.yaml", "--", "true"], "none.yaml"),
        (["--preset", "a30-x2"], "which command is missing; e.g. `./scripts/gpusim run -- nvitop -1`."),
        (["--preset", "a30-x2", "--", "no-such-program"], "there is no program no-such-program; "),
        (["--state", "/usr", "--", "true"], "/usr holds files that are not a simulated server's; name another folder."),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(words: list[str], said: str) -> None:
    done = gpusim("run", *words)
    assert done.returncode == REFUSED
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_simulated_beside_real_hardware(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "devices/0000:17:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    problem = doctor.real_hardware_problem(tmp_path / "devices")
    monkeypatch.setattr(doctor, "real_hardware_problem", lambda: problem)
    started = tmp_path / "started"
    assert cli.main(["run", "--state", str(folder), "--", "touch", str(started)]) == CANNOT
    assert "this machine has NVIDIA hardware (PCI 0000:17:00.0)" in capsys.readouterr().err
    assert not started.exists()


def test_without_an_environment_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PYTHON", tmp_path / ".venv/bin/python")
    assert cli.main(["presets"]) == CANNOT
    assert capsys.readouterr().err == "there is no .venv in this checkout; run `./scripts/setup`.\n"


# ---- show ----


def test_show_says_what_there_is(call: Any, folder: Path) -> None:
    with state_file.change(folder / "gpus.conf") as state:
        gpu = state.gpus[1]
        used = (gpu.number("memory_reserved_bytes") or 0) // 2**20 + 3072
        gpu.set("mig_current", "1")
        gpu.set("mig_pending", "0")
        gpu.add("gpu_instance", "3 0 0 1")
        gpu.add("compute_instance", "3 0 0 0 2")
        gpu.add("process", f"{os.getpid()} {3 << 30} compute 3 0")
        gpu.add("process", "4194304 1073741824 compute - -")  # no such process
        state.add_event(1, 8, 13, now=0)
    code, said, _ = call("show")
    assert code == 0
    lines = said.splitlines()
    assert lines[0] == f"{folder}: driver 550.163.01, CUDA 12.4"
    # What no GPU of the server has, such as NVLink, has no column.
    assert " ".join(lines[1].split()) == "GPU NAME PCI MEMORY MiB TEMP POWER W UTIL PCIe MIG STATE"
    assert "on, off after a reset" in lines[3]
    assert f"{used} of 24576" in lines[3]
    assert "  GPU 1: instance 3, 1g.6gb, from slot 0, compute instances 0" in lines
    assert f"  GPU 1, instance 3.0: 3072 MiB, compute, process {os.getpid()} {sys.executable}" in lines
    assert "4194304" not in said
    assert lines[-1].endswith("  GPU 1: XID 13")


def test_show_as_json_and_of_one_gpu(call: Any) -> None:
    call("fault", "thermal-throttle", "--gpu", "1")
    data = json.loads(call("show", "--json")[1])
    assert [gpu["name"] for gpu in data["gpus"]] == ["NVIDIA A30"] * 2
    assert (data["gpus"][0]["throttle_reasons"], data["gpus"][1]["throttle_reasons"]) == (1, 0x48)
    assert [(fault["fault"], fault["of"], fault["until"]) for fault in data["faults"]] == [
        ("thermal-throttle", "1", "clear")
    ]
    one = json.loads(call("show", "--json", "--gpu", "0")[1])
    assert ([gpu["index"] for gpu in one["gpus"]], one["faults"]) == ([0], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpuready-standin 1\n", "line 1: not `gpuready-standin 2`; mend it, or make the server anew"),
        ("gpuready-standin 2\n[system]\nnonsense\n", "line 3: neither a section nor `key = value`; mend it"),
        ("gpuready-standin 2\n[system]\n[gpu 0]\nprocess = x\n", "line 4: a process is `process = PID BYTES"),
        ("gpuready-standin 2\n[fault x]\n", "line 2: a fault begins with [fault NAME GPU] or [fault NAME system]; "),
        ("\0\xff", "gpus.conf: "),
        (run.compiled("t4-x1", "test") + "# \xe9\n", "line 76: not printable ASCII; mend it"),
    ],
)
def test_a_damaged_file_is_one_sentence(call: Any, folder: Path, text: str, said: str) -> None:
    (folder / "gpus.conf").write_text(text, encoding="latin-1")
    for verb, *words in (["show"], ["set", "init_error=0"], ["fault", "gpu-lost"], ["clear"]):
        code, _, error = call(verb, *words)
        assert code == REFUSED
        assert said in error
        assert len(error.splitlines()) == 1


# ---- set ----


def test_a_key_is_set_where_it_was_asked_for(call: Any, folder: Path) -> None:
    assert call("set", "temperature_celsius=71", "fan_percent=-", "init_error=9", "--gpu", "1")[0] == 0
    state = state_file.read(folder / "gpus.conf")
    assert [gpu.get("temperature_celsius") for gpu in state.gpus] == ["28", "71"]
    assert (state.gpus[1].get("fan_percent"), state.system.get("init_error")) == (None, "9")
    assert call("set", "temperature_celsius=30", "--gpu", "all")[0] == 0
    assert [gpu.get("temperature_celsius") for gpu in state_file.read(folder / "gpus.conf").gpus] == ["30", "30"]


def test_a_number_with_zeros_before_it_is_shown_as_the_library_reads_it(call: Any) -> None:
    assert call("set", "temperature_celsius=038", "--gpu", "0")[0] == 0
    assert json.loads(call("show", "--json", "--gpu", "0")[1])["gpus"][0]["temperature_celsius"] == 38


def test_a_key_that_a_fault_lies_over_is_told(call: Any) -> None:
    call("fault", "thermal-throttle", "--gpu", "0")
    code, said, _ = call("set", "temperature_celsius=30", "--gpu", "0")
    assert (code, said) == (0, "temperature_celsius of gpu 0 is hidden by a fault until that is cleared\ndone\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["temprature_celsius=3", "--gpu", "0"], "temprature_celsius is not a key that can be set; the nearest is "),
        (["nvlink=3", "--gpu", "0"], "nvlink is not a key that can be set; "),
        (["temperature_celsius=hot", "--gpu", "0"], "temperature_celsius = hot is not a whole number (decimal, or"),
        (["name=" + "x" * 96, "--gpu", "0"], "is not a text of at most 95 printable characters"),
        (["temperature_celsius=3"], "which GPU has another value is missing; give --gpu 0 to 1, or --gpu all."),
        (["temperature_celsius=3", "--gpu", "2"], "there is no GPU 2; "),
        (["temperature_celsius"], "temperature_celsius is not KEY=VALUE; e.g. temperature_celsius=80."),
        (
            ["memory_used_bytes=99999999999", "--gpu", "0"],
            "more memory is reserved and used than there is; nothing was",
        ),
        (["pci_address=17", "--gpu", "0"], "pci_address = 17 is no PCI address; nothing was changed."),
        (["events_made=3"], "events_made is not a key that can be set; "),
    ],
)
def test_what_cannot_be_set_is_refused_and_nothing_changes(
    call: Any, folder: Path, words: list[str], said: str
) -> None:
    before = (folder / "gpus.conf").read_bytes()
    code, _, error = call("set", *words)
    assert code == REFUSED
    assert said in error
    assert len(error.splitlines()) == 1
    assert (folder / "gpus.conf").read_bytes() == before
    assert not (folder / "gpus.conf.new").exists()


def test_the_keys_are_those_of_the_library(call: Any) -> None:
    table = {key.name: key for key in keys.table()}
    assert table["name"].length == 95
    assert (table["driver_version"].of, table["init_error"].of, table["lost"].of) == ("system", "system", "gpu")
    assert len(table) > 90
    listed = call("set")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(table)


# ---- words ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show"], "which server is missing; name a machine first, or a folder with --state."),
        (["show", "--state", "/no/such"], "/no/such holds no simulated server; make one with `./scripts/gpusim run"),
        (["fault", "--state", "FOLDER"], "which fault is missing; `./scripts/gpusim faults` lists them."),
        (["fault", "--state", "FOLDER", "gpu-lots"], "there is no fault gpu-lots; the nearest is gpu-lost; "),
        (
            ["fault", "--state", "FOLDER", "gpu-lost"],
            "which GPU has gpu-lost is missing; give --gpu 0 to 1, or --gpu all.",
        ),
        (["fault", "--state", "FOLDER", "gpu-lost", "more"], "more is one word too many; see --help."),
        (
            ["fault", "--state", "FOLDER", "driver-not-loaded", "--gpu", "1"],
            "driver-not-loaded is of the whole server; ",
        ),
        (["show", "--state", "FOLDER", "extra"], "extra is one word too many"),
    ],
)
def test_a_command_line_that_lacks_something_says_what(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word.replace("FOLDER", str(folder)) for word in words]) == REFUSED
    assert said in capsys.readouterr().err


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults"]) == 0
    assert "gpu-lost                 the GPU has fallen off the bus" in capsys.readouterr().out
    done = gpusim("presets")
    assert "a30-x2                   2 x NVIDIA A30 in a server with two sockets\n" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == sorted(
        file.stem for file in (CHECKOUT / "sim/hardware/presets").glob("*.yaml")
    )


def test_the_page_tells_of_every_server_and_fault() -> None:
    page = (CHECKOUT / "docs/simulator.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    firsts = {word.strip(" |,").split(" ")[0] for row in rows for word in row[0].split(",")}
    assert {fault.name for fault in FAULTS} <= firsts
    for name, server in servers.KNOWN.items():
        (row,) = [row for row in rows if row[0] == f"| {name}"]
        assert f"`{server.kind.preset}`" in row[2]
        assert row[3] == f".{server.place} |"
    options = {planting.flag(option.name) for fault in FAULTS for option in fault.options}
    assert [option for option in sorted(options) if option not in page] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["fau"], "fault faults"),
        (["fault", "h100-sg-01", "nv"], "nvlink-down"),
        (["create", "x", "--preset", "a30"], "a30-x2"),
        (["create", "x", "--suite", ""], "trixie bookworm"),
    ],
)
def test_bash_completes_the_words(words: list[str], offered: str) -> None:
    script = gpusim("completion").stdout
    quoted = " ".join(f"'{word}'" for word in ["./scripts/gpusim", *words])
    call = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _gpusim; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{call}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{offered}\n"
