"""Descriptions of simulated hardware: each of ours compiles to what the library reads, and a wrong one is refused."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml
from sim.hardware import describe, install, words
from sim.hardware.links import connect
from sim.hardware.model import Server
from sim.hardware.refusal import RefusalError
from sim.hardware.state_file import parse
from sim.hardware.state_text import render_state
from tests.unit.standin import CHECKOUT

PRESETS = describe.names("presets")
CATALOG: dict[str, Any] = yaml.safe_load((CHECKOUT / "src/gpuready/catalog/gpus.yaml").read_text(encoding="utf-8"))[
    "cards"
]

OWN = """\
description: two cards of my own
sources: [myself]
gpu:
  sources: [myself]
  name: NVIDIA Own
  driver: {version: 550.163.01, nvml: 12.550.163.01, cuda: 12.4}
  brand: nvidia
  architecture: hopper
  compute_capability: 9.0
  pci:
    {device: 0x2330, subsystem_vendor: 0x10de, subsystem_device: 0x16c1, class_code: 0x030200, revision: 0xa1,
     generation: 4, generation_max: 5, width: 16, width_max: 16}
  memory: {total_bytes: 85520809984, reserved_bytes: 352321536}
  clocks_mhz: {sm: 345, sm_max: 1980}
  power_milliwatts: {limit: 700000, limit_min: 200000, limit_max: 700000}
  temperature_celsius: {slowdown: 89, shutdown: 95}
  nvlink: {version: 4, links: 4, mbps: 26562}
  mig: {table: h100-80, max_devices: 7, needs_reset: false, mode_persists: false}
numa: {0: 0-7}
gpus:
  - {address: 0000:1b:00.0, numa_node: 0, root: 0, switch: 0}
  - {address: 0000:43:00.0, numa_node: 0, root: 0, switch: 1}
nvlink: {links: {0: [1, 0000:05:00.0], 1: [0]}}
devices:
  - {what: a switch, address: 0000:05:00.0, vendor: 0x10de, device: 0x22a3, class_code: 0x068000}
"""

WRONG: list[dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("wrong_descriptions.yaml").read_text(encoding="utf-8")
)
TABLE = """{sources: [myself], slots: 8, profiles: {1g.10gb:
    {profile: 1_slice, id: 19, slices: 1, max: 2, multiprocessors: 16, copy_engines: 1, decoders: 1,
     encoders: 0, jpegs: 1, ofas: 0, memory_mib: 10112, size: 1, starts: [0, 6]}}}"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install.compile_program(tmp_path_factory.mktemp("program"))


def own(place: Path, text: str = OWN) -> Server:
    file = place / "own.yaml"
    file.write_text(text, encoding="utf-8")
    return describe.load_server(str(file))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_library_reads_every_preset(preset: str, program: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpus.conf"
    file.write_text(render_state(describe.load_server(preset), "machine"), encoding="ascii")
    done = subprocess.run([str(program), "check", str(file)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_server_boots_with_what_its_description_says(preset: str, program: Path, tmp_path: Path) -> None:
    """The C code reads, boots and writes it: nothing of a new server is lost by a boot."""
    file = tmp_path / "gpus.conf"
    text = render_state(describe.load_server(preset), "machine")
    file.write_text(text, encoding="ascii")
    subprocess.run([str(program), "boot"], env={"GPUREADY_STANDIN_STATE": str(file)}, check=True)
    before, after = (
        [section for section in parse(one).sections if section.title != "system"] for one in (text, file.read_text())
    )

    assert [{(key, normal(value)) for key, value in section.lines} for section in before] == [
        set(section.lines) - {("lost", "0"), ("reset_stuck", "0")} for section in after
    ]


def normal(value: str) -> str:
    return str(int(value, 16)) if value.startswith("0x") else value


@pytest.mark.parametrize("name", describe.names("gpus"))
def test_a_gpu_of_the_catalog_is_the_same_here(name: str) -> None:
    gpu, card = describe.load_gpu(name), CATALOG[name]
    usable = gpu.memory.total_bytes - (gpu.memory.reserved_bytes or 0)

    assert f"{gpu.pci.device:04x}" in card["pci"]
    assert gpu.name in card["nvml_names"]
    assert gpu.compute_capability == card["compute"]
    # The catalog has the lowest figure that was seen, or an estimate; drivers differ by some hundred MiB.
    below = 0.99 if card.get("estimated") else 0.9995
    assert card["usable_gib"] * below <= usable / 2**30 <= card["usable_gib"] * 1.025
    floor = [int(part) for part in card.get("driver_min", "0").split(".")]
    assert [int(part) for part in gpu.driver.version.split(".")] >= floor


def test_every_card_of_the_catalog_is_here_and_every_preset_s_gpu() -> None:
    named = {
        yaml.safe_load((describe.HERE / f"presets/{one}.yaml").read_text(encoding="utf-8"))["gpu"] for one in PRESETS
    }

    assert set(describe.names("gpus")) == set(CATALOG) == named


@pytest.mark.parametrize(
    ("mapping", "prefix"),
    [
        (words.BRANDS, "NVML_BRAND_"),
        (words.ARCHITECTURES, "NVML_DEVICE_ARCH_"),
        (words.FABRIC_STATES, "NVML_GPU_FABRIC_STATE_"),
    ],
)
def test_words_are_nvml_s_numbers(mapping: dict[str, int], prefix: str) -> None:
    assert {word: getattr(pynvml, prefix + word.upper()) for word in mapping} == mapping


def test_profiles_are_nvml_s_numbers() -> None:
    known = {
        name.removeprefix("NVML_GPU_INSTANCE_PROFILE_").lower(): value
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_GPU_INSTANCE_PROFILE_")
    }

    assert {word: known[word] for word in words.MIG_PROFILES} == words.MIG_PROFILES


def test_mig_names_follow_from_the_memory() -> None:
    """The rule of NVIDIA/go-nvlib's NewMigProfile: eighths of the memory, rounded up, of the whole GiB of the card."""
    for name in describe.names("gpus"):
        gpu = describe.load_gpu(name)
        total = gpu.memory.total_bytes / 2**20
        for profile, one in ({} if gpu.mig is None else gpu.mig.table.profiles).items():
            eighths = -(-8 * one.memory_mib // total)
            gigabytes = int(eighths / 8 * -(-total // 1024) + 0.5)
            assert re.match(r"\d+g\.\d+gb", profile)[0] == f"{one.slices}g.{gigabytes}gb", (name, profile)  # type: ignore[index]


def test_an_own_file_may_hold_its_own_gpu_and_table(tmp_path: Path) -> None:
    server = own(tmp_path, OWN.replace("table: h100-80", f"table: {TABLE}"))
    text = render_state(server, "mine")

    assert "profile = 0 19 1 2 16 1 1 0 1 0 10112 1 0,6 1g.10gb" in text.splitlines()
    assert [[link.address for link in links] for links in connect(server, tmp_path)] == [
        ["0000:43:00.0", "0000:05:00.0"],
        ["0000:1b:00.0"],
    ]


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    keys = {line.partition(" = ")[0] for line in render_state(own(tmp_path), "mine").splitlines()}

    assert "clock_sm" in keys
    assert not keys & {"clock_memory", "fan_percent", "ecc_current", "recovery_action", "fabric_state", "vbios_version"}


def test_every_gpu_of_a_mesh_reaches_every_other() -> None:
    server = describe.load_server("a100-40gb-sxm-x4")
    addresses = [place.address for place in server.gpus]
    links = connect(server, Path())

    assert addresses == ["0000:07:00.0", "0000:46:00.0", "0000:85:00.0", "0000:c7:00.0"]
    assert [link.address for link in links[1]] == [addresses[i] for i in (0, 0, 0, 0, 2, 2, 2, 2, 3, 3, 3, 3)]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: re.sub("[^ -~]", " ", case["new"])[:40] or case["old"][:40])
def test_a_wrong_description_is_refused_with_file_and_key(case: dict[str, str], tmp_path: Path) -> None:
    assert case["old"] in OWN
    with pytest.raises(RefusalError) as refused:
        own(tmp_path, OWN.replace(case["old"], case["new"], 1))

    assert str(refused.value) == f"{tmp_path}/own.yaml: {case['sentence']}"


def test_a_minor_number_may_be_given_but_not_twice(tmp_path: Path) -> None:
    text = OWN.replace("switch: 0}", "switch: 0, minor: 1}").replace("switch: 1}", "switch: 1, minor: 0}")
    minors = [line for line in render_state(own(tmp_path, text), "mine").splitlines() if line.startswith("minor")]

    assert minors == ["minor = 1", "minor = 0"]
    with pytest.raises(RefusalError, match=r"own\.yaml: two of gpus have the minor 1$"):
        own(tmp_path, text.replace("minor: 0", "minor: 1"))


def test_modules_of_one_board_differ_and_those_of_cards_need_not(tmp_path: Path) -> None:
    text = (CHECKOUT / "sim/hardware/presets/b200-180gb-sxm-x8.yaml").read_text(encoding="utf-8")
    with pytest.raises(RefusalError, match=r"own\.yaml: two of gpus have the module 6$"):
        own(tmp_path, text.replace("module: 8", "module: 6"))

    cards = OWN.replace("switch: 0}", "switch: 0, module: 1}").replace("switch: 1}", "switch: 1, module: 1}")
    assert render_state(own(tmp_path, cards), "mine").count("\nmodule_id = 1\n") == 2


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("starts: [0, 6]", "starts: [0, 8]", "1g.10gb at 8 with size 1 goes beyond the 8 slots"),
        ("size: 1,", "size: 3,", "1g.10gb at 6 with size 3 goes beyond the 8 slots"),
        ("memory_mib: 10112", "memory_mib: 42000", "2 x 1g.10gb has 84000 MiB, the card has 81558"),
        ("slices: 1,", "slices: 2,", "1g.10gb has 2 slices and is called 1_slice"),
        ("max: 2,", "max: 3,", "3 x 1g.10gb need as many starts that differ, not [0, 6]"),
        ("starts: [0, 6]", "starts: [0, 0]", "2 x 1g.10gb need as many starts that differ, not [0, 0]"),
        ("}}}", "}, 1g.10gb+me: {profile: 1_slice_rev1, id: 19, slices: 1, max: 1, multiprocessors: 16,"
         " copy_engines: 1, decoders: 1, encoders: 0, jpegs: 1, ofas: 1, memory_mib: 10112, size: 1, starts: [0]}}}",
         "two profiles have the id 19"),
    ],
)  # fmt: skip
def test_a_wrong_mig_table_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TABLE
    with pytest.raises(RefusalError) as refused:
        own(
            tmp_path,
            OWN.replace("85520809984", "85520000000").replace("table: h100-80", f"table: {TABLE.replace(old, new)}"),
        )

    assert str(refused.value) == f"{tmp_path}/own.yaml: gpu.mig: {sentence}"


def test_more_gpus_than_the_library_holds_are_refused(tmp_path: Path) -> None:
    more = "".join(f"  - {{address: 0000:a0:{index:02x}.0, root: 9}}\n" for index in range(15))
    with pytest.raises(
        RefusalError, match=r"own\.yaml: gpus: list should have at most 16 items after validation, not 17$"
    ):
        own(tmp_path, OWN.replace("nvlink: {links", f"{more}nvlink: {{links"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a description: it holds no `key: value` at its top"),
        (b"- a\n- b\n", "is not a description: it holds no `key: value` at its top"),
        (b"a: [", "is not YAML in line 1: expected the node content, but found '<stream end>'"),
        (b"a: 1\nb: 2\na: 3\n", "is not YAML in line 3: a stands twice"),
        (b"a: 1\n? [b]\n: 2\n", "is not YAML in line 2: a key is one word"),
        (b"a: !!python/object:os.system x\n", "is not YAML in line 1: could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/object:os.system'"),
        (b"a: \xff\n", "is not UTF-8 text"),
        (b"a: \0\n", "is not YAML: unacceptable character #x0000: special characters are not allowed in "
         '"<unicode string>", position 3'),
        (b"a: !!bool maybe\n", "is not YAML: a value is not of the type that its tag says"),
        (b"a: !!timestamp never\n", "is not YAML: a value is not of the type that its tag says"),
        (b"a: !!int ''\n", "is not YAML: a value is not of the type that its tag says"),
        (b"a: !!map [b]\n", "is not YAML: a value is not of the type that its tag says"),
        (b"[" * 3000, "is not YAML: it is nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_description_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes(content)
    with pytest.raises(RefusalError) as refused:
        describe.load_server(str(file))

    assert str(refused.value) == f"{file} {sentence}"


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=f"^there is no preset 'h100'; known are: {', '.join(PRESETS)}$"):
        describe.load_server("h100")
    with pytest.raises(RefusalError, match=r"none\.yaml cannot be read: No such file or directory$"):
        describe.load_server(str(tmp_path / "none.yaml"))
    file = tmp_path / "own.yaml"
    file.write_text("gpu: h100\n", encoding="ascii")
    with pytest.raises(RefusalError, match=r"own\.yaml: gpu: there is no GPU 'h100'; known are: a100-40gb-pcie, "):
        describe.load_server(str(file))


PARTS = re.compile(r"[^\s:,{}\[\]]+")
INSTEAD = (
    *("null", "true", "-1", "0", "1", "16", "0xffff", "99999999999999999999", "[]", "{}", "{a: 1}", '"x\\ty"'),
    *("h100-80", "0000:1b:00.0", "ffff:ff:00.0", "0-7", "ü", "a" * 200, "9007199254740991", "!!binary aGk=", "&a [*a]"),
    *("2026-01-01", ""),
)  # fmt: skip


def test_what_is_not_refused_is_right_for_the_library(program: Path, tmp_path: Path) -> None:
    """One part of a good description is replaced at a time: a sentence, or a state file that the C code takes."""
    chance = random.Random(4)  # noqa: S311 - the same parts every time
    base = OWN.replace("table: h100-80", f"table: {TABLE}")
    accepted, sentences = 0, [""]
    for _ in range(400):
        part = chance.choice(list(PARTS.finditer(base)))
        text = base[: part.start()] + chance.choice(INSTEAD) + base[part.end() :]
        try:
            state = render_state(own(tmp_path, text), "mine")
        except RefusalError as refusal:
            sentences.append(str(refusal))
            continue
        accepted += 1
        (tmp_path / "gpus.conf").write_text(state, encoding="ascii")
        subprocess.run([str(program), "check", str(tmp_path / "gpus.conf")], check=True)

    assert 20 <= accepted <= 200
    assert [sentence for sentence in sentences if not sentence.isprintable() or len(sentence) > 500] == []
