"""Preflight: what is declared against what the server is, refused in sentences, before anything is changed."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from tests.unit.planning_options import LLAMA_8B

from gpuready import catalog
from gpuready.operations.facts import placement, release_files
from gpuready.planning.host import decide, engine_ports, keep_or_renew, needs_of
from gpuready.planning.preflight import driver_failures, stand_in_failures
from gpuready.planning.surroundings import TARGETS

GIB = 1024**3
GATEWAY = {
    "port": 8080,
    "bind": "*",
    "body_limit_kib": 1024,
    "request_timeout_seconds": 900,
    "hold_seconds": 120,
    "max_connections": 2000,
}


MODEL = {"config": LLAMA_8B, "weight_bytes": 16 * GIB, "failures": [], "resolved": "/data/llama"}


def good_spec() -> dict[str, Any]:
    return {
        "gpuready_gpu_model": "h100",
        "gpuready_gpu_count": 8,
        "gpuready_stack": "cu128",
        "gpuready_simulated": False,
        "gpuready_expect": {},
        "gpuready_replan": False,
        "gpuready_deployments": [
            {
                "name": "chat",
                "model": "llama",
                "model_path": "/data/llama",
                "engine": "vllm",
                "gpus": 1,
                "flags": {},
                "workload": {
                    "prompt_tokens": {"p50": 800, "p99": 4000},
                    "output_tokens": {"p50": 300, "p99": 1500},
                    "concurrency": 64,
                },
            }
        ],
    }


def good_facts() -> dict[str, Any]:
    disk = {"mount": "/", "free_bytes": 500 * GIB, "total_bytes": 900 * GIB}
    gpu = {"name": "NVIDIA H100 80GB HBM3", "nvlink_links": 18, "mig_mode": "disabled", "problem": None}
    return {
        "os": {"id": "debian", "version": "12"},
        "architecture": "x86_64",
        "python": "3.11",
        "gpus": [{"address": f"0000:{index:02x}:00.0", "device_id": "2330"} for index in range(8)],
        "nvml": {"driver": "580.95.05", "problem": None, "gpus": [{**gpu, "index": index} for index in range(8)]},
        "nvswitch_count": 4,
        "nvme_count": 8,
        "cpu": {"physical_cores": 96},
        "ram_bytes": 2000 * GIB,
        "filesystems": dict.fromkeys(needs_of(None, None)["paths"], disk),
        "targets": dict.fromkeys(TARGETS, {"mount": "/", "place": "/", "problem": "", "noexec": False}),
        "clock": 1796000000.0,
        "unknown_locales": {},
        "listening": [],
        "candidates": {"cuda-toolkit-12-8": "12.8.1-1"},
        "candidates_problem": "",
        "simulated_marker": None,
        "models": {"/data/llama": dict(MODEL)},
        "engines": [],
        "packages": {"cuda-toolkit-12-8": None},
        "begun": {},
        "repositories": [],
        "stored_plan": None,
        "placement": {},
    }


def sentences(spec: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    _, failures = decide("h1", spec, GATEWAY, facts, {})
    return [failure.sentence() for failure in failures]


def test_a_server_as_declared_is_planned() -> None:
    plan, failures = decide("h1", good_spec(), GATEWAY, good_facts(), {})
    assert failures == []
    assert plan is not None
    assert plan["engines"][0]["lock"] == "vllm-0.19.1-cu128-py311"
    assert plan["host"]["cuda"]["sm"] == "sm_90"
    assert plan["gateway"]["body_limit_bytes"] == 1024**2


def facts_with(**change: Any) -> dict[str, Any]:
    return {**good_facts(), **change}


def other_cards(device_id: str, count: int = 8) -> dict[str, Any]:
    return facts_with(gpus=[{"address": str(index), "device_id": device_id} for index in range(count)])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            other_cards("20b2"),
            "contradicted by the hardware: its PCI bus shows a100-80gb-sxm (10de:20b2); set gpuready_gpu",
        ),
        (other_cards("9999"), "shows an unknown card (10de:9999); known cards are t4"),
        (facts_with(gpus=[]), "the server shows no NVIDIA GPU on its PCI bus"),
        (
            other_cards("2330", 7),
            "gpuready_gpu_count = 8, but the PCI bus shows 7 NVIDIA GPUs; set gpuready_gpu_count: 7",
        ),
        (
            facts_with(os={"id": "debian", "version": "11"}),
            "h1 runs debian 11: it is not supported; supported are Debian",
        ),
        (facts_with(os={"id": "fedora", "version": "40"}), "supported are Debian 12/13, Ubuntu 22.04/24.04"),
        (facts_with(architecture="aarch64"), "host h1 is aarch64: it is not supported; x86_64 is"),
        (facts_with(simulated_marker={"builder": "x"}), "is a simulated server, but gpuready_simulated is not true"),
    ],
)
def test_contradiction_is_one_sentence(facts: dict[str, Any], words: str) -> None:
    found = sentences(good_spec(), facts)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize(
    ("marker", "made_with"),
    [({"builder": "x"}, "none"), ({"builder": "x", "standins": ["other"]}, "other"), (None, "none")],
)
def test_an_engine_without_its_stand_in_on_the_machine_is_refused(
    marker: dict[str, Any] | None, made_with: str
) -> None:
    engines: list[dict[str, Any]] = [
        {"engine": "vllm", "version": "0.32.0", "standin": None},
        {"engine": "sglang", "version": "0.5.23", "standin": "sglang_cpu_one"},
    ]
    (failure,) = stand_in_failures("h1", engines, facts_with(simulated_marker=marker))
    assert failure.sentence() == (
        "host h1: sglang 0.5.23 needs the stand-in sglang_cpu_one, which is not on it: the machine was made with "
        f"{made_with}; make the machine anew from this checkout."
    )
    there = {"builder": "x", "standins": ["other", "sglang_cpu_one"]}
    assert stand_in_failures("h1", engines, facts_with(simulated_marker=there)) == []


def test_simulated_needs_the_marker_too() -> None:
    found = sentences({**good_spec(), "gpuready_simulated": True}, good_facts())
    assert "was not made by this checkout's machine builder" in found[0]


def test_driver_that_names_another_card() -> None:
    facts = copy.deepcopy(good_facts())
    facts["nvml"]["gpus"][3]["name"] = "NVIDIA H100 PCIe"
    (sentence,) = sentences(good_spec(), facts)
    assert "contradicted by the driver: it names NVIDIA H100 PCIe; expected is NVIDIA H100 80GB HBM3" in sentence


def test_a_gpu_that_fell_off_the_bus_of_the_driver() -> None:
    facts = copy.deepcopy(good_facts())
    facts["nvml"]["gpus"][7]["problem"] = "GPU is lost"
    del facts["nvml"]["gpus"][0]
    found = sentences(good_spec(), facts)
    assert any("the driver shows 7 GPUs, the PCI bus 8" in one for one in found)
    assert any("GPU 7 does not answer the driver: GPU is lost" in one for one in found)


def test_driver_that_does_not_answer() -> None:
    facts = good_facts()
    facts["nvml"] = {"driver": None, "problem": "Driver/library version mismatch (NVML 18)", "gpus": []}
    (sentence,) = sentences(good_spec(), facts)
    assert "the NVIDIA driver does not answer: Driver/library version mismatch" in sentence


def test_a_driver_that_no_longer_knows_the_card_is_refused() -> None:
    facts = {"nvml": {"driver": "595.45.04"}}
    stack = catalog.load("stacks")["stacks"]["cu124-volta"]
    (failure,) = driver_failures("h1", "v100s-32gb", "cu124-volta", stack, facts)
    assert "the NVIDIA driver is 595.45.04: branch 580 is the last that knows this card" in failure.sentence()
    assert driver_failures("h1", "v100s-32gb", "cu124-volta", stack, {"nvml": {"driver": "580.95.05"}}) == []
    assert driver_failures("h1", "t4", "cu128", catalog.load("stacks")["stacks"]["cu128"], facts) == []


def test_no_driver_is_refused_before_gigabytes_are_installed() -> None:
    (sentence,) = sentences(good_spec(), facts_with(nvml=None))
    assert "there is no NVIDIA driver on the server; install driver 525.60.13 or newer" in sentence


@pytest.mark.parametrize(
    ("card", "device", "driver", "words"),
    [
        ("h100", "2330", "470.82.01", "the NVIDIA driver is 470.82.01: h100-80gb-sxm on this stack needs 525.60.13"),
        ("b200", "2901", "560.35.03", "the NVIDIA driver is 560.35.03: b200-180gb-sxm on this stack needs 570.133.20"),
    ],
)
def test_a_driver_that_is_too_old_is_refused(card: str, device: str, driver: str, words: str) -> None:
    facts = copy.deepcopy(good_facts())
    facts["gpus"] = other_cards(device)["gpus"]
    facts["nvml"]["driver"] = driver
    for gpu in facts["nvml"]["gpus"]:
        gpu["name"] = "NVIDIA B200" if card == "b200" else gpu["name"]
    (sentence,) = sentences({**good_spec(), "gpuready_gpu_model": card}, facts)
    assert words in sentence


def test_mig_is_named_with_the_gpu() -> None:
    facts = copy.deepcopy(good_facts())
    facts["nvml"]["gpus"][2]["mig_mode"] = "enabled"
    (sentence,) = sentences(good_spec(), facts)
    assert "MIG is enabled on GPU 2" in sentence


def test_a_toolkit_that_no_source_offers_is_refused_first() -> None:
    (sentence,) = sentences(good_spec(), facts_with(candidates={"cuda-toolkit-12-8": None}))
    assert "no package source of the server offers cuda-toolkit-12-8; add NVIDIA's CUDA repository" in sentence


@pytest.mark.parametrize("folder", ["/home/ubuntu/llama", "/root/llama", "/tmp/llama"])
def test_a_model_that_engines_cannot_see_is_refused(folder: str) -> None:
    models = copy.deepcopy(good_facts()["models"])
    models["/data/llama"]["resolved"] = folder
    (sentence,) = sentences(good_spec(), facts_with(models=models))
    assert "move the model, e.g. below /srv or /data" in sentence


def test_port_of_an_engine_is_taken() -> None:
    facts = facts_with(listening=[{"port": 18100, "pid": 7, "program": "x", "unit": None}])
    (sentence,) = sentences(good_spec(), facts)
    assert "deployment chat = 18100 is taken by x (pid 7)" in sentence


def test_ports_of_all_replicas_are_looked_at() -> None:
    parts = [{"index": 0, "port": 18100}, {"index": 1, "port": 18101}]
    plan = {"deployments": [{"name": "chat", "replicas": parts}, {"name": "code", "replicas": [{"port": 18102}]}]}
    engines = "gpuready-engine@"
    assert engine_ports(plan) == {
        "deployment chat, replica 0": (18100, engines),
        "deployment chat, replica 1": (18101, engines),
        "deployment code": (18102, engines),
    }


def test_placement_of_the_stored_plan_is_that_of_all_replicas() -> None:
    parts = [{"index": 0, "gpus": [1], "port": 18100}, {"index": 1, "gpus": [3], "port": 18104}]
    assert placement({"deployments": [{"name": "chat", "replicas": parts}]}) == {"chat": parts}
    assert placement(None) == {}


def test_cuda_source_of_the_operator_counts() -> None:
    spec = {**good_spec(), "gpuready_stack": "cpu", "gpuready_simulated": True}
    facts = facts_with(simulated_marker={"builder": "x"})
    _, refused = decide("h1", spec, GATEWAY, facts, {})
    assert "the archive of debian 12 holds 11.8" in refused[0].sentence()
    _, failures = decide("h1", spec, GATEWAY, facts, {}, {"source": "configured"})
    assert failures == []


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"cpu_cores": 128}, "gpuready_expect.cpu_cores = 128, but the server has 96"),
        ({"ram_gib": 4000}, "gpuready_expect.ram_gib = 4000, but the server has 2105"),
        ({"nvme_count": 9}, "gpuready_expect.nvme_count = 9, but the server has 8"),
        ({"nvswitch_count": 6}, "gpuready_expect.nvswitch_count = 6, but the server has 4"),
        ({"nvlink_links_per_gpu": 12}, "gpuready_expect.nvlink_links_per_gpu = 12, but the server has 18"),
    ],
)
def test_what_is_paid_for_must_be_there(expect: dict[str, int], words: str) -> None:
    (sentence,) = sentences({**good_spec(), "gpuready_expect": expect}, good_facts())
    assert words in sentence


def test_what_cannot_be_read_does_not_pass() -> None:
    spec = {**good_spec(), "gpuready_expect": {"nvlink_links_per_gpu": 18}}
    found = sentences(spec, facts_with(nvml=None))
    assert any("gpuready_expect.nvlink_links_per_gpu = 18 cannot be checked" in one for one in found)


def test_one_gpu_with_fewer_links_is_seen() -> None:
    facts = copy.deepcopy(good_facts())
    facts["nvml"]["gpus"][5]["nvlink_links"] = 17
    (sentence,) = sentences({**good_spec(), "gpuready_expect": {"nvlink_links_per_gpu": 18}}, facts)
    assert "but the server has 17" in sentence


def test_memory_that_the_firmware_keeps_is_not_a_missing_module() -> None:
    assert sentences({**good_spec(), "gpuready_expect": {"ram_gib": 2048}}, good_facts()) == []


def test_full_disk_adds_up_all_paths_of_one_filesystem() -> None:
    facts = good_facts()
    facts["filesystems"] = dict.fromkeys(facts["filesystems"], {"mount": "/", "free_bytes": 10 * GIB})
    (sentence,) = sentences(good_spec(), facts)
    assert "host h1: / has 10.0 GiB free, and" in sentence
    assert "free space on /" in sentence


def test_a_finished_server_needs_little_room() -> None:
    plan, _ = decide("h1", good_spec(), GATEWAY, good_facts(), {})
    assert plan is not None
    facts = facts_with(
        packages={"cuda-toolkit-12-8": "12.8.1"},
        engines=[plan["engines"][0]["folder"]],
        filesystems=dict.fromkeys(good_facts()["filesystems"], {"mount": "/", "free_bytes": 3 * GIB}),
    )
    assert sentences(good_spec(), facts) == []


def test_what_an_interrupted_installation_has_written_is_not_asked_for_again() -> None:
    facts = good_facts()
    needed = re.search(r"([\d.]+) GiB are needed", sentences(good_spec(), facts | small_disk(1))[0])
    assert needed
    free = float(needed[1]) - 6
    assert "GiB are needed" in sentences(good_spec(), facts | small_disk(free))[0]
    begun = {"/opt/gpuready": 4 * GIB, "/usr": 2 * GIB, "/var/cache": GIB}
    assert sentences(good_spec(), facts | small_disk(free) | {"begun": begun}) == []


def small_disk(free_gib: float) -> dict[str, Any]:
    disk = {"mount": "/", "free_bytes": free_gib * GIB, "total_bytes": 900 * GIB}
    return {"filesystems": dict.fromkeys(needs_of(None, None)["paths"], disk)}


def test_a_small_disk_of_its_own_is_named() -> None:
    facts = good_facts()
    facts["filesystems"] = {
        **facts["filesystems"],
        "/opt/gpuready": {"mount": "/opt", "free_bytes": 3 * GIB},
    }
    (sentence,) = sentences(good_spec(), facts)
    assert "host h1: /opt has 3.0 GiB free" in sentence


def test_port_of_the_gateway_is_taken() -> None:
    facts = facts_with(listening=[{"port": 8080, "pid": 77, "program": "nginx", "unit": "nginx.service"}])
    (sentence,) = sentences(good_spec(), facts)
    assert "gateway_port = 8080 is taken by nginx (pid 77); stop it, or choose another port" in sentence


def test_our_own_gateway_may_hold_the_port() -> None:
    facts = facts_with(listening=[{"port": 8080, "pid": 77, "program": "haproxy", "unit": "gpuready-gateway.service"}])
    assert sentences(good_spec(), facts) == []


def test_unreachable_repository() -> None:
    facts = facts_with(repositories=[{"uri": "http://mirror.example/debian", "suite": "trixie", "problem": "no route"}])
    (sentence,) = sentences(good_spec(), facts)
    assert "the package source http://mirror.example/debian (trixie) does not answer: no route" in sentence


def test_model_failures_carry_the_host() -> None:
    failure = {"code": "model.missing", "what": "model folder /data/llama does not exist", "why": "", "fix": "copy it"}
    facts = facts_with(models={"/data/llama": {"failures": [failure]}})
    where = "host h1, deployment chat, model_path = /data/llama"
    assert sentences(good_spec(), facts) == [f"{where}: model folder /data/llama does not exist; copy it."]


def test_simulated_model_on_a_real_server_is_refused() -> None:
    spec = good_spec()
    spec["gpuready_deployments"][0].update(model="gpuready-sim/tiny-qwen2", model_path=None)
    _, failures = decide("h1", spec, GATEWAY, good_facts(), {"gpuready-sim/tiny-qwen2": {"revision": "1"}})
    assert "has random weights and is for simulated servers only" in failures[0].sentence()


def test_model_path_missing_from_the_declaration() -> None:
    spec = good_spec()
    spec["gpuready_deployments"][0]["model_path"] = None
    (sentence,) = sentences(spec, good_facts())
    assert "deployment chat: model_path is not set" in sentence


def test_everything_at_once() -> None:
    facts = facts_with(
        gpus=other_cards("20b2")["gpus"],
        os={"id": "debian", "version": "11"},
        filesystems=dict.fromkeys(good_facts()["filesystems"], {"mount": "/", "free_bytes": GIB}),
        listening=[{"port": 8080, "pid": 77, "program": "nginx", "unit": "nginx.service"}],
    )
    _, failures = decide("h1", {**good_spec(), "gpuready_stack": "cpu"}, GATEWAY, facts, {})
    assert [failure.code for failure in failures] == [
        "preflight.system",
        "preflight.gpu_model",
        "preflight.port",
        "preflight.cuda_source",
        "plan.simulated_only",
        "preflight.disk",
    ]


def test_the_stored_plan_stays_while_its_inputs_are_the_same() -> None:
    plan, _ = decide("h1", good_spec(), GATEWAY, good_facts(), {})
    assert plan is not None
    older = copy.deepcopy(plan)
    older["deployments"][0]["settings"]["max_num_seqs"] = 7
    kept, note = keep_or_renew(plan, older, renew=False)
    assert kept["deployments"][0]["settings"]["max_num_seqs"] == 7
    assert "would plan chat otherwise; take its plan with -e gpuready_replan=true" in note
    renewed, note = keep_or_renew(plan, older, renew=True)
    assert (renewed, note) == (plan, "")


def test_another_workload_is_another_plan() -> None:
    plan, _ = decide("h1", good_spec(), GATEWAY, good_facts(), {})
    changed = good_spec()
    changed["gpuready_deployments"][0]["workload"]["concurrency"] = 8
    other, _ = decide("h1", changed, GATEWAY, good_facts(), {})
    assert plan is not None
    assert other is not None
    assert keep_or_renew(other, plan, renew=False)[0] == other


def test_release_files_are_read_from_apts_own_list() -> None:
    printed = (
        "'http://mirror.example/debian/dists/trixie/InRelease' mirror.example_debian_dists_trixie_InRelease 0 \n"
        "'http://mirror.example/debian/dists/trixie/main/binary-amd64/Packages.xz' mirror.example_Packages 0 \n"
        "'https://other.example/flat/./InRelease' other.example_flat_._InRelease 0 \n"
        "N: a note\n"
    )
    assert release_files(printed) == [
        "http://mirror.example/debian/dists/trixie/InRelease",
        "https://other.example/flat/./InRelease",
    ]
