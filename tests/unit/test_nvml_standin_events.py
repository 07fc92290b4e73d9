"""Events of the stand-in library: what happens after a set has registered, each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.unit.nvml_asking import DIVIDED, ask
from tests.unit.standin import library_directory, state, with_lines

Ask = Callable[[str, str], Any]
XID, DOUBLE_BIT, MIG = 0x8, 0x2, 0x100
INVALID, UNSUPPORTED, TIMEOUT, LOST = (
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_GPU_IS_LOST,
)

# `happens` adds events to the state file as the simulation's own programs do: a new file in the place of the old one.
EVENTS = """
PLACE = os.environ["GPUREADY_STANDIN_STATE"]

def replace(old, new):
    with open(PLACE) as file:
        text = file.read()
    assert old in text
    with open(PLACE + ".new", "w") as file:
        file.write(text.replace(old, new, 1))
    os.replace(PLACE + ".new", PLACE)

made = 0

def happens(gpu, kind, data, instances="- -"):
    global made
    made += 1
    event = f"event = {made} {gpu} {kind} {data} {instances} {int(time.time())}"
    replace("[system]\\n", f"[system]\\nevents_made = {made}\\n")
    replace("\\n\\n[gpu 0]", f"\\n{event}\\n\\n[gpu 0]")
    if made > 1:
        replace(f"events_made = {made - 1}\\n", "")

def registered(*pairs):
    events = N.nvmlEventSetCreate()
    for index, kinds in pairs:
        N.nvmlDeviceRegisterEvents(N.nvmlDeviceGetHandleByIndex(index), kinds, events)
    return events

def wait(events, timeout=0):
    try:
        event = N.nvmlEventSetWait_v2(events, timeout)
    except N.NVMLError as error:
        return error.value
    return [N.nvmlDeviceGetIndex(event.device), event.eventType, event.eventData, event.gpuInstanceId,
        event.computeInstanceId]
"""


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, EVENTS + code)


def test_only_what_happens_after_the_registration_comes_and_only_once(asked: Ask) -> None:
    code = """
happens(0, 8, 13)
events, other = registered((0, 8), (1, 8)), registered((0, 8))
before = wait(events)
happens(0, 8, 79)
happens(2, 8, 31)
happens(1, 8, 48, "2 0")
answer([before, wait(events), wait(events), wait(events), wait(other), wait(other)])
"""
    none = 0xFFFFFFFF

    assert asked(state(), code) == [
        TIMEOUT,
        [0, XID, 79, none, none],
        [1, XID, 48, 2, 0],
        TIMEOUT,
        [0, XID, 79, none, none],
        TIMEOUT,
    ]


def test_a_kind_that_is_registered_later_counts_from_then_on(asked: Ask) -> None:
    code = """
events = registered((0, 8))
happens(0, 2, 0)
N.nvmlDeviceRegisterEvents(gpu, 2, events)
first = wait(events)
happens(0, 2, 1)
answer([first, wait(events)[:3], wait(events)])
"""
    assert asked(state(), code) == [TIMEOUT, [0, DOUBLE_BIT, 1], TIMEOUT]


def test_who_waits_is_woken_by_another_process_and_other_threads_go_on(asked: Ask) -> None:
    code = """
events = registered((0, 8))
found = []
waiting = threading.Thread(target=lambda: found.append(wait(events, 60000)))
waiting.start()
meanwhile = N.nvmlDeviceGetTemperature(gpu, 0)
child = os.fork()
if child == 0:
    happens(0, 8, 79)
    os._exit(0)
os.waitpid(child, 0)
waiting.join()
answer([meanwhile, found[0][:3]])
"""
    assert asked(state(), code) == [29, [0, XID, 79]]


def test_a_lost_gpu_ends_the_wait_once_its_events_are_told(asked: Ask) -> None:
    code = """
events, other = registered((0, 8)), registered((1, 8))
happens(0, 8, 79)
replace("[gpu 0]\\n", "[gpu 0]\\nlost = 1\\n")
def first(events):
    event = N.nvmlEventSetWait_v2(events, 0)
    return event.eventData
answer([first(events), wait(events, 60000), wait(other)])
"""
    assert asked(state(), code) == [79, LOST, TIMEOUT]


def test_which_kinds_there_are_depends_on_the_card(asked: Ask) -> None:
    plain = with_lines(state(), 0, "ecc_current = -", "ecc_pending = -")
    code = """
events = N.nvmlEventSetCreate()
answer([N.nvmlDeviceGetSupportedEventTypes(gpu), code(N.nvmlDeviceRegisterEvents, gpu, 4, events)])
"""

    assert asked(state(), code) == [XID | DOUBLE_BIT | 0x1 | MIG, UNSUPPORTED]
    assert asked(plain, code) == [XID | MIG, UNSUPPORTED]


def test_events_are_registered_for_whole_gpus(asked: Ask) -> None:
    code = "answer(code(N.nvmlDeviceRegisterEvents, mig(), 8, N.nvmlEventSetCreate()))"

    assert asked(with_lines(state(), 0, *DIVIDED), code) == UNSUPPORTED


def test_a_set_that_is_freed_or_never_was_is_refused(asked: Ask) -> None:
    code = """
events = registered((0, 8))
N.nvmlEventSetFree(events)
never = ctypes.cast(ctypes.create_string_buffer(4096), ctypes.c_void_p)
inside = ctypes.c_void_p(ctypes.cast(events, ctypes.c_void_p).value + 8)
answer([wait(events), code(N.nvmlEventSetFree, events), raw("nvmlEventSetFree", never), raw("nvmlEventSetFree", inside),
        raw("nvmlEventSetFree", None), raw("nvmlEventSetCreate", None), code(N.nvmlDeviceRegisterEvents, gpu, 8,
        events),
        raw("nvmlEventSetWait_v2", registered(), None, 0)])
"""
    assert asked(state(), code) == [INVALID] * 8


def test_sets_run_out_and_shutdown_forgets_them(asked: Ask) -> None:
    code = """
def fill():
    made = 0
    while code(N.nvmlEventSetCreate) == 0:
        made += 1
    return [made, code(N.nvmlEventSetCreate)]
first = fill()
N.nvmlShutdown()
N.nvmlInit()
answer([first, fill()])
"""
    assert asked(state(), code) == [[64, pynvml.NVML_ERROR_MEMORY]] * 2


def test_the_first_version_of_the_wait_ends_before_the_instances(asked: Ask) -> None:
    code = """
events = registered((0, 8))
happens(0, 8, 43)
data = ctypes.create_string_buffer(b"x" * 32, 32)
answer([raw("nvmlEventSetWait", events, data, 0), int.from_bytes(data.raw[16:24], "little"), data.raw[24:].decode(),
        raw("nvmlEventSetWait", events, None, 0)])
"""
    assert asked(state(), code) == [0, 43, "x" * 8, INVALID]
