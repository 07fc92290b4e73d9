"""MIG of the stand-in library, asked through pynvml: what drivers were seen to do, and what must never happen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.standin import library_directory, python, state

DATA = Path(__file__).with_name("data") / "mig"
TRANSCRIPTS = json.loads((DATA / "driver_placement_transcripts.json").read_text())["cases"]
VALID = json.loads((DATA / "valid_combos.json").read_text())
PRESETS = {
    "a30": "a30-x2",
    "a100-40": "a100-40gb-sxm-x4",
    "h100-80": "h100-80gb-sxm-x8",
    "rtxpro6000": "rtx-pro-6000-x8",
}
ONE_NAME = re.compile(r"\d+g\.\d+gb(?:\+me\.all|\+me|\+gfx|-me)?")
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 2, 3, 4
RESET_REQUIRED, IN_USE, INSUFFICIENT_RESOURCES = 16, 19, 23

# What every piece of code below begins with. `make` creates GPU instances in order, and ends at the first refusal.
BEGIN = """
import ctypes, json, os, subprocess, sys
import pynvml as N

N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(0)

def profiles():
    found = {}
    for number in range(N.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = N.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number)
        except N.NVMLError_NotSupported:
            continue
        found[info.name.removeprefix("MIG ")] = info
    return found

def places(name):
    found, count = (N.c_nvmlGpuInstancePlacement_t * 16)(), N.c_uint(16)
    N.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profiles()[name].id, found, N.byref(count))
    return [[place.start, place.size] for place in found[: count.value]]

def instances(name):
    found, count = (N.c_nvmlGpuInstance_t * 16)(), N.c_uint(16)
    N.nvmlDeviceGetGpuInstances(gpu, profiles()[name].id, found, N.byref(count))
    return found[: count.value]

def place(instance):
    info = N.nvmlGpuInstanceGetInfo(instance)
    return [info.id, info.placement.start, info.placement.size]

def create(name, start=None):
    number = profiles()[name].id
    if start is None:
        return N.nvmlDeviceCreateGpuInstance(gpu, number)
    placement = N.c_nvmlGpuInstancePlacement_t(start, places(name)[0][1])
    return N.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, number, N.byref(placement))

def make(names):
    made = []
    for name in names:
        try:
            made.append(place(create(name)))
        except N.NVMLError as error:
            return [*made, error.value]
    return made

def code(function, *words):
    try:
        function(*words)
    except N.NVMLError as error:
        return error.value
    return 0

def set_mode(mode):
    activation = N.c_uint()
    N._nvmlCheckReturn(N._nvmlGetFunctionPointer("nvmlDeviceSetMigMode")(gpu, mode, N.byref(activation)))
    return [activation.value, N.nvmlDeviceGetMigMode(gpu)]

def mig_uuids():
    found = []
    for index in range(N.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(N.nvmlDeviceGetUUID(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
        except N.NVMLError_NotFound:
            break
    return found

def answer(value):
    print(json.dumps(value))
"""

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in."""
    return library_directory(tmp_path_factory.mktemp("library"))


@pytest.fixture
def ask(library: Path, tmp_path: Path) -> Ask:
    """Run code against a simulated server; with a state it begins anew, without one it goes on."""
    file = tmp_path / "gpus.conf"

    def run(text: str, fresh: str = "") -> Any:
        if fresh:
            file.write_text(fresh)
        return python(BEGIN + text, library, file)

    return run


def with_mig(preset: str, **changes: str) -> str:
    return state(preset, **{"mig_current": "1", "mig_pending": "1", **changes})


def preset_of(case: dict[str, Any]) -> str:
    if "A30" in case["gpu"]:
        return PRESETS["a30"]
    if "RTX" in case["gpu"]:
        return PRESETS["rtxpro6000"]
    if case["gpu"].startswith("H100 PCIe"):
        return "h100-80gb-pcie-x4"
    return PRESETS["h100-80" if case["gpu"].startswith("H100") else "a100-40"]


def named_as_here(names: list[str], ask: Ask, fresh: str) -> list[str]:
    """Return the profiles by this GPU's names; a transcript of other memory, or of slices alone, has others."""
    known = ask("answer({name: i.id for name, i in profiles().items()})", fresh)
    if all(name in known for name in names):
        return names
    by_id = {number: name for name, number in known.items()}
    ids = {"1g": 19, "2g": 14, "3g": 9, "3g.47gb": 9, "1g.24gb": 15, "1g.12gb": 19}
    return [by_id[ids[name]] for name in names]


@pytest.mark.parametrize("case", TRANSCRIPTS, ids=lambda case: f"{case['gpu']}: {','.join(case['create'])}")
def test_the_driver_places_as_public_transcripts_show(case: dict[str, Any], ask: Ask) -> None:
    fresh = with_mig(preset_of(case), mig_mirrored="1" if "numbering" in case else "0")
    made = ask(f"answer(make({named_as_here(case['create'], ask, fresh)!r}))", fresh)
    ids = [one if isinstance(one, int) else one[0] for one in made]
    expected = case.get("gi_ids") or case["gi_ids_prefix"]
    assert ids[: len(expected)] == [case.get("rc") if number is None else number for number in expected]
    for shown, got in zip(case.get("place", []), made, strict=False):
        assert shown is None or shown == f"{got[1]}:{got[2]}"


MAKE_ALL = """
known = profiles()
size = {name: places(name)[0][1] for name in known}
made = {}
for text in json.loads(open(WANTED).read()):
    for name in known:
        for instance in instances(name):
            N.nvmlGpuInstanceDestroy(instance)
    names = text.split(" ")
    made[text] = make(sorted(names, key=lambda name: (-known[name].sliceCount, -size[name])))
answer(made)
"""


def make_all(sets: list[tuple[str, ...]], gpu: str, ask: Ask, tmp_path: Path) -> dict[tuple[str, ...], list[Any]]:
    """Create each set on an empty GPU, in a planner's order: many slices first, of these the large ones."""
    (tmp_path / "wanted.json").write_text(json.dumps([" ".join(one) for one in sets]))
    text = MAKE_ALL.replace("WANTED", repr(str(tmp_path / "wanted.json")))
    made = ask(text, with_mig(PRESETS[gpu]))
    return {tuple(names.split(" ")): places for names, places in made.items()}


def names_of(combination: str) -> tuple[str, ...]:
    names = tuple(ONE_NAME.findall(combination))
    assert "+".join(names) == combination
    return tuple(sorted(names))


@pytest.mark.parametrize("gpu", PRESETS)
def test_every_valid_set_can_be_created_in_the_planned_order(gpu: str, ask: Ask, tmp_path: Path) -> None:
    sets = [names_of(text) for text in VALID[gpu]["valid"]]
    assert len(sets) >= 21
    for names, made in make_all(sets, gpu, ask, tmp_path).items():
        assert [one for one in made if isinstance(one, int)] == [], names
        assert len(made) == len(names)
        taken = [slot for _, start, size in made for slot in range(start, start + size)]
        assert len(taken) == len(set(taken)), names


@pytest.mark.parametrize("gpu", PRESETS)
def test_an_invalid_set_fails_with_the_drivers_code(gpu: str, ask: Ask, tmp_path: Path) -> None:
    valid = {names_of(text) for text in VALID[gpu]["valid"]}
    every = sorted({name for names in valid for name in names})
    invalid = {tuple(sorted((*names, name))) for names in valid for name in every} - valid
    assert len(invalid) >= 50
    for names, made in make_all(sorted(invalid), gpu, ask, tmp_path).items():
        assert made[-1] == INSUFFICIENT_RESOURCES, names
        assert len(made) <= len(names)


def test_order_matters_as_the_user_guide_says(ask: Ask) -> None:
    names = ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"]
    assert ask(f"answer(make({names!r}))", with_mig(PRESETS["a100-40"]))[-1] == INSUFFICIENT_RESOURCES
    made = ask("answer(make(['3g.20gb', '1g.5gb', '2g.10gb', '1g.5gb']))", with_mig(PRESETS["a100-40"]))
    assert all(isinstance(one, list) for one in made)


AT_ONCE = """
one = "import pynvml as N; N.nvmlInit(); N.nvmlDeviceCreateGpuInstance(N.nvmlDeviceGetHandleByIndex(0), 19)"
running = [subprocess.Popen([sys.executable, "-c", one], stderr=subprocess.PIPE, text=True) for _ in range(9)]
said = [child.communicate()[1].strip().splitlines() for child in running]
answer([sorted(lines[-1] for lines in said if lines), sorted(place(i)[0] for i in instances("1g.10gb"))])
"""


def test_nine_that_create_at_once_make_seven(ask: Ask) -> None:
    refused, made = ask(AT_ONCE, with_mig(PRESETS["h100-80"]))
    assert made == [7, 8, 9, 10, 11, 12, 13]
    assert refused == ["pynvml.NVMLError_InsufficientResources: Insufficient Resources"] * 2


def test_an_ampere_gpu_changes_its_mode_at_a_reset(ask: Ask) -> None:
    assert ask("answer(set_mode(1))", state(PRESETS["a100-40"])) == [RESET_REQUIRED, [0, 1]]
    assert ask("answer(code(create, '1g.5gb', 0))") == NOT_SUPPORTED
    assert ask("answer(N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19))") == 0
    assert ask("answer(set_mode(0))") == [0, [0, 0]]


def test_a_hopper_gpu_changes_its_mode_at_once(ask: Ask) -> None:
    assert ask("answer(set_mode(1))", state(PRESETS["h100-80"])) == [0, [1, 1]]
    assert ask("create('1g.10gb'); answer(set_mode(0))") == [IN_USE, [1, 0]]
    assert ask("N.nvmlGpuInstanceDestroy(instances('1g.10gb')[0]); answer(set_mode(0))") == [0, [0, 0]]


def test_who_holds_a_gpu_keeps_its_mode(ask: Ask) -> None:
    fresh = state(PRESETS["h100-80"]).replace("[gpu 0]", "[gpu 0]\nheld_by_module = nvidia_drm", 1)
    assert ask("answer(set_mode(1))", fresh) == [IN_USE, [0, 1]]


def test_a_gpu_without_mig_says_so(ask: Ask) -> None:
    text = """
answer([code(N.nvmlDeviceGetMigMode, gpu), code(set_mode, 1), N.nvmlDeviceGetMaxMigDeviceCount(gpu), profiles()])
"""
    assert ask(text, state("t4-x1")) == [NOT_SUPPORTED, NOT_SUPPORTED, 0, {}]


def test_only_root_changes_anything(ask: Ask, tmp_path: Path) -> None:
    text = """
os.setuid(65534)
answer([code(create, "1g.10gb"), code(set_mode, 0), N.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19)])
"""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    assert ask(text, with_mig(PRESETS["h100-80"])) == [NO_PERMISSION, NO_PERMISSION, 7]


LIFE = """
parent = create("3g.40gb", 4)
part = N.nvmlGpuInstanceCreateComputeInstance(parent, N.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE)
before = mig_uuids()
device = N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
again = code(N.nvmlGpuInstanceCreateComputeInstance, parent, N.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE)
in_use = code(N.nvmlGpuInstanceDestroy, parent)
N.nvmlComputeInstanceDestroy(part)
stale = [code(N.nvmlDeviceGetUUID, device), code(N.nvmlComputeInstanceGetInfo_v2, part)]
N.nvmlGpuInstanceDestroy(parent)
stale += [code(N.nvmlGpuInstanceGetInfo, parent), code(N.nvmlGpuInstanceDestroy, parent)]
answer([before, mig_uuids(), again, in_use, stale])
"""


def test_the_life_of_an_instance(ask: Ask) -> None:
    (uuid,), after, again, in_use, stale = ask(LIFE, with_mig(PRESETS["h100-80"]))
    assert re.fullmatch(r"MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid)
    assert after == []
    assert again == INSUFFICIENT_RESOURCES
    assert in_use == IN_USE
    assert stale == [INVALID_ARGUMENT] * 4


def test_the_same_place_has_the_same_uuid(ask: Ask) -> None:
    text = """
for start in (0, 2):
    N.nvmlGpuInstanceCreateComputeInstance(create("2g.20gb", start), N.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE)
answer(mig_uuids())
"""
    first = ask(text, with_mig(PRESETS["h100-80"]))
    assert len(set(first)) == 2
    assert ask(text, with_mig(PRESETS["h100-80"])) == first


def test_a_placement_is_taken_or_refused_never_moved(ask: Ask) -> None:
    text = """
first = place(create("3g.40gb", 0))
answer([first, code(create, "3g.40gb", 2), code(create, "1g.10gb", 3), place(create("1g.10gb", 5))])
"""
    assert ask(text, with_mig(PRESETS["h100-80"])) == [[1, 0, 4], INVALID_ARGUMENT, INSUFFICIENT_RESOURCES, [12, 5, 1]]


PARTS = """
whole = create("7g.80gb")
infos = {}
for number in range(N.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
    try:
        info = N.nvmlGpuInstanceGetComputeInstanceProfileInfo(whole, number, 0)
        infos[info.name] = [info.id, info.sliceCount, info.instanceCount]
    except N.NVMLError_NotSupported:
        pass
parts = [N.nvmlGpuInstanceCreateComputeInstance(whole, 0) for _ in range(7)]
full = code(N.nvmlGpuInstanceCreateComputeInstance, whole, 0)
N.nvmlComputeInstanceDestroy(parts[3])
left = N.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(whole, 0)
back = N.nvmlComputeInstanceGetInfo_v2(N.nvmlGpuInstanceCreateComputeInstance(whole, 0))
attributes = N.nvmlDeviceGetAttributes_v2(N.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 3))
answer([infos, full, left, [back.id, back.placement.start], len(set(mig_uuids())),
        [attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount, attributes.memorySizeMB]])
"""


def test_compute_instances_divide_a_gpu_instance(ask: Ask) -> None:
    infos, full, left, back, devices, attributes = ask(PARTS, with_mig(PRESETS["h100-80"]))
    assert infos == {
        "MIG 1c.7g.80gb": [0, 1, 7],
        "MIG 2c.7g.80gb": [1, 2, 3],
        "MIG 3c.7g.80gb": [2, 3, 2],
        "MIG 4c.7g.80gb": [3, 4, 1],
        "MIG 7g.80gb": [4, 7, 1],
    }
    assert (full, left, back, devices) == (INSUFFICIENT_RESOURCES, 1, [3, 3], 7)
    assert attributes == [7, 1, 81152]


def test_a_process_keeps_its_instance(ask: Ask, tmp_path: Path) -> None:
    ask("N.nvmlGpuInstanceCreateComputeInstance(create('1g.10gb', 0), 0)\nanswer(0)", with_mig(PRESETS["h100-80"]))
    file = tmp_path / "gpus.conf"
    file.write_text(file.read_text().replace("[gpu 1]", "process = 1 1048576 compute 7 0\n[gpu 1]", 1))
    text = """
parent = N.nvmlDeviceGetGpuInstanceById(gpu, 7)
part = N.nvmlGpuInstanceGetComputeInstanceById(parent, 0)
answer([code(N.nvmlComputeInstanceDestroy, part), code(N.nvmlGpuInstanceGetComputeInstanceById, parent, 1)])
"""
    assert ask(text) == [IN_USE, 6]


CHURN = """
import pynvml as N
N.nvmlInit()
gpu = N.nvmlDeviceGetHandleByIndex(0)
while True:
    N.nvmlGpuInstanceDestroy(N.nvmlDeviceCreateGpuInstance(gpu, 0))
"""
KILLED = """
import random, time
for turn in range(12):
    child = subprocess.Popen([sys.executable, "-c", CHURN])
    time.sleep(0.2 + random.random() / 20)
    child.kill()
    child.wait()
    for instance in instances("7g.80gb"):
        N.nvmlGpuInstanceDestroy(instance)
    N.nvmlGpuInstanceDestroy(create("7g.80gb"))
answer(len(instances("7g.80gb")))
"""


def test_who_is_killed_in_the_middle_of_a_change_leaves_it_whole(ask: Ask) -> None:
    assert ask(f"CHURN = {CHURN!r}\n{KILLED}", with_mig(PRESETS["h100-80"])) == 0


def test_slots_that_no_known_card_has_give_every_instance_an_id_of_its_own(ask: Ask) -> None:
    """Twelve places of one slot: a heap's numbers for them begin at 11 and end beyond the ids that there are."""
    kept = [line for line in with_mig(PRESETS["a100-40"]).splitlines() if not line.startswith("profile = ")]
    profile = "profile = 0 19 1 12 14 1 0 0 0 0 4864 1 0,1,2,3,4,5,6,7,8,9,10,11 1g.5gb"
    text = "\n".join(kept).replace("mig_slots = 8", f"mig_slots = 12\n{profile}") + "\n"
    made = ask("""answer(make(["1g.5gb"] * 13))""", text)
    assert [one if isinstance(one, int) else one[1] for one in made] == [*range(12), 23]
    assert sorted(one[0] for one in made[:-1]) == [0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15]
