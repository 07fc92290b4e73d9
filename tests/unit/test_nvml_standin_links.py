"""NVLink, peer-to-peer access, topology and fabric, in the stand-in library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.unit.nvml_asking import ask
from tests.unit.standin import library_directory, state, with_lines

Ask = Callable[[str, str], Any]
INVALID, UNSUPPORTED, MISMATCH = (
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
OK, NS = pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
ALL_DOWN = tuple(f"nvlink_down = {link}" for link in range(18))
P2P = """
def p2p(first, second):
    return [N.nvmlDeviceGetP2PStatus(N.nvmlDeviceGetHandleByIndex(first), N.nvmlDeviceGetHandleByIndex(second), kind)
            for kind in range(5)]
"""


def without_links() -> str:
    return "\n".join(line for line in state().splitlines() if not line.startswith("nvlink")) + "\n"


@pytest.fixture
def asked(tmp_path: Path) -> Ask:
    library = library_directory(tmp_path / "library")
    return lambda text, code: ask(library, tmp_path, text, P2P + code)


def test_links_of_an_h100_go_to_switches(asked: Ask) -> None:
    code = """
answer([[N.nvmlDeviceGetNvLinkState(gpu, link) for link in range(18)], N.nvmlDeviceGetNvLinkVersion(gpu, 0),
        [N.nvmlDeviceGetNvLinkCapability(gpu, 0, one) for one in range(6)],
        N.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, 17),
        N.nvmlDeviceGetNvLinkRemotePciInfo(gpu, 0).busId, N.nvmlDeviceGetNvLinkErrorCounter(gpu, 0, 0),
        [code(N.nvmlDeviceGetNvLinkState, gpu, link) for link in (18, 2**32 - 1)],
        code(N.nvmlDeviceGetNvLinkCapability, gpu, 0, 6),
        code(N.nvmlDeviceGetNvLinkErrorCounter, gpu, 0, 5)])
"""
    assert asked(state(), code) == [
        [1] * 18,
        pynvml.NVML_NVLINK_VERSION_4_0,
        [1] * 6,
        pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
        "00000000:05:00.0",
        0,
        [INVALID, INVALID],
        INVALID,
        INVALID,
    ]


def test_a_link_that_is_down_has_the_errors_and_no_other_end(asked: Ask) -> None:
    text = with_lines(state(), 0, "nvlink_down = 3", "nvlink_crc_errors = 5", "nvlink_recovery_errors = 2")
    code = """
answer([N.nvmlDeviceGetNvLinkState(gpu, 3), N.nvmlDeviceGetNvLinkState(gpu, 2),
        code(N.nvmlDeviceGetNvLinkRemotePciInfo, gpu, 3),
        [[N.nvmlDeviceGetNvLinkErrorCounter(gpu, link, kind) for kind in range(3)] for link in (0, 3)],
        code(N.nvmlDeviceGetNvLinkErrorCounter, gpu, 3, 3), fields(147)[0][2], p2p(0, 1)])
"""
    assert asked(text, code) == [0, 1, UNSUPPORTED, [[0, 0, 0], [0, 2, 5]], UNSUPPORTED, 17, [OK, OK, OK, OK, OK]]


def test_a_card_without_links_says_so(asked: Ask) -> None:
    code = "answer([code(N.nvmlDeviceGetNvLinkState, gpu, 0), fields(91, 164), p2p(0, 1)])"
    text = with_lines(without_links(), 1, "pcie_peer_to_peer = 0")

    assert asked(text, code) == [UNSUPPORTED, [[UNSUPPORTED, 1, 0]] * 2, [NS] * 5]


# ---- peer to peer ----


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((), [OK, OK, OK, OK, OK]),
        (("pcie_peer_to_peer = 0",), [OK, OK, OK, OK, NS]),
        (("mig_current = 1", "mig_pending = 1"), [NS] * 5),
        (("fabric_state = 2",), [NS, NS, NS, NS, OK]),
        (ALL_DOWN, [NS, NS, NS, NS, OK]),
    ],
    ids=["joined", "not-by-pcie", "mig", "fabric-in-progress", "all-links-down"],
)
def test_who_reaches_whom(asked: Ask, lines: tuple[str, ...], status: list[int]) -> None:
    assert asked(with_lines(state(), 1, *lines), "answer([p2p(0, 1), p2p(1, 0), p2p(0, 2)])") == [
        status,
        status,
        [OK, OK, OK, OK, OK],
    ]


def test_pcie_alone_reaches_without_nvlink_and_without_atomics(asked: Ask) -> None:
    assert asked(without_links(), "answer([p2p(0, 1), code(N.nvmlDeviceGetP2PStatus, gpu, gpu, 0)])") == [
        [OK, OK, NS, NS, OK],
        INVALID,
    ]


def test_links_between_two_gpus_join_these_two(asked: Ask) -> None:
    text = with_lines(without_links(), 0, "nvlink = 0 gpu 0000:43:00.0")
    text = with_lines(with_lines(text, 1, "pcie_peer_to_peer = 0"), 2, "pcie_peer_to_peer = 0")
    one_sided = asked(text, "answer(p2p(0, 1))")
    joined = asked(
        with_lines(text, 1, "nvlink = 0 gpu 0000:1b:00.0"),
        "answer([p2p(0, 1), p2p(0, 2), N.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, 0),"
        " N.nvmlDeviceGetNvLinkRemotePciInfo(gpu, 0).pciDeviceId])",
    )

    assert one_sided == [NS] * 5
    assert joined == [[OK, OK, OK, OK, NS], [NS] * 5, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, 0x233010DE]


def test_on_ampere_mig_switches_the_links_off_and_on_hopper_it_does_not(asked: Ask) -> None:
    mode = ("mig_current = 1", "mig_pending = 1")
    code = "answer([N.nvmlDeviceGetNvLinkState(gpu, 0), fields(147)[0][2]])"

    assert asked(with_lines(state("a100-80gb-sxm-x8"), 0, *mode), code) == [0, 0]
    assert asked(with_lines(state(), 0, *mode), code) == [1, 18]


# ---- topology ----


def test_how_near_gpus_are(asked: Ask) -> None:
    text = state()
    for gpu, lines in enumerate([(105, 101), (105, 101), (106, 101)]):
        text = with_lines(text, gpu, f"pcie_switch = {lines[0]}", f"pcie_root = {lines[1]}")
    code = """
ancestor = [N.nvmlDeviceGetTopologyCommonAncestor(gpu, N.nvmlDeviceGetHandleByIndex(other)) for other in (0, 1, 2,
        3, 4)]
nearest = [[N.nvmlDeviceGetIndex(one) for one in N.nvmlDeviceGetTopologyNearestGpus(gpu, level)] for level in (10,
        30, 40, 50)]
answer([ancestor, nearest, code(N.nvmlDeviceGetTopologyNearestGpus, gpu, 11)])
"""
    assert asked(text, code) == [
        [
            pynvml.NVML_TOPOLOGY_INTERNAL,
            pynvml.NVML_TOPOLOGY_SINGLE,
            pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
            pynvml.NVML_TOPOLOGY_NODE,
            pynvml.NVML_TOPOLOGY_SYSTEM,
        ],
        [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]],
        INVALID,
    ]


# ---- fabric ----


FABRIC = """
def versioned(struct):
    info = struct()
    result = raw("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(info))
    return [result, info.state, info.status, info.cliqueId, info.healthMask, bytes(info.clusterUuid).hex()]
"""


def test_the_fabric_of_an_h100(asked: Ask) -> None:
    cluster = "11223344-5566-7788-99aa-bbccddeeff00"
    text = with_lines(state(), 0, f"fabric_cluster = {cluster}", "fabric_clique = 9", "fabric_health = 0xaa")
    code = f"""{FABRIC}
old, beyond = N.c_nvmlGpuFabricInfo_t(), N.c_nvmlGpuFabricInfo_v3_t()
raw("nvmlDeviceGetGpuFabricInfo", gpu, ctypes.byref(old))
beyond.version, beyond.healthSummary = N.nvmlGpuFabricInfo_v2, 77
raw("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(beyond))
third, wrong = N.c_nvmlGpuFabricInfo_v3_t(), N.c_nvmlGpuFabricInfo_v3_t()
wrong.version = 0x4000028
raw("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(third))
answer([versioned(N.c_nvmlGpuFabricInfo_v2_t), versioned(N.c_nvmlGpuFabricInfo_v3_t), [old.state, old.cliqueId],
        beyond.healthSummary, third.healthSummary, raw("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(wrong))])
"""
    known = [0, pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 9, 0xAA, cluster.replace("-", "")]

    assert asked(text, code) == [
        known,
        known,
        [pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 9],
        77,  # what lies beyond version 2 is the caller's
        pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY,
        MISMATCH,
    ]


@pytest.mark.parametrize(
    ("mask", "summary"), [(0, 0), (0xAA, 1), (0xA9, 2), (0x6A, 2), (0x1AA, 1), (0x5AA, 2)], ids=hex
)
def test_health_is_summed_up(asked: Ask, mask: int, summary: int) -> None:
    code = """
info = N.c_nvmlGpuFabricInfo_v3_t()
raw("nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(info))
answer(info.healthSummary)
"""
    assert asked(with_lines(state(), 0, f"fabric_health = {mask}"), code) == summary


def test_an_a100_tells_nothing_of_its_fabric_and_misses_it_all_the_same(asked: Ask) -> None:
    text = with_lines(state("a100-80gb-sxm-x8"), 0, "fabric_state = 1")

    assert asked(text, FABRIC + "answer([versioned(N.c_nvmlGpuFabricInfo_v2_t)[0], p2p(0, 1), p2p(1, 2)])") == [
        UNSUPPORTED,
        [NS, NS, NS, NS, OK],
        [OK, OK, OK, OK, OK],
    ]
