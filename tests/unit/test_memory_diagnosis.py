"""Out-of-memory diagnosis on lines that the engines' sources write, and on what is no out-of-memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuready.memory import diagnosis
from gpuready.memory.cures import Known
from gpuready.memory.neighbours import Holder

REPORTS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "data/oom_logs.yaml").read_text())
"""Public reports: what was written, and which kind it was."""

NO_ROOM = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (4.38 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated "
    "maximum model length is 9344. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"
)


def test_the_engines_own_estimate_is_the_value_of_the_cure() -> None:
    found = diagnosis.of_log(f"(EngineCore pid=110) ERROR 08-28 07:39:28 [core.py:1346] {NO_ROOM}")
    assert found is not None
    assert (found.kind, found.cure.flag, found.cure.value) == ("kv_cache", "max-model-len", 9344)
    assert found.evidence == (NO_ROOM,)


def test_a_larger_share_is_the_cure_where_the_figures_say_that_it_suffices() -> None:
    log = f"Free memory on device (78.5/79.1 GiB) on startup. gpu_memory_utilization=0.6 ... \n{NO_ROOM}"
    found = diagnosis.of_log(log)
    assert found is not None
    assert (found.cure.flag, found.cure.direction, found.cure.value) == ("gpu-memory-utilization", "raise", 0.65)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("OSError: [Errno 98] Address already in use", "the port is in use"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "the NVIDIA driver is missing"),
        ("api_server.py: error: unrecognized arguments: --max-modle-len 1", "the engine refuses its arguments"),
        (
            "out of resource: shared memory, Required: 106496, Hardware limit: 101376",
            "a kernel needs more shared memory",
        ),
    ],
)
def test_what_is_no_lack_of_memory_is_said_to_be_something_else(log: str, said: str) -> None:
    assert diagnosis.of_log(log) is None
    assert (diagnosis.other_cause(log) or "").startswith(said)


def test_advice_about_out_of_memory_is_no_out_of_memory() -> None:
    log = (
        "INFO Capturing cudagraphs for decoding. If out-of-memory error occurs during cudagraph capture, consider "
        "decreasing `gpu_memory_utilization`\nINFO If OOM'ed, check the difference of initial free memory\n"
        "    except torch.cuda.OutOfMemoryError as e:\n"
    )
    assert diagnosis.of_log(log) is None


def of_report(report: dict[str, Any], log: str) -> diagnosis.Diagnosis | None:
    return diagnosis.of_log(log, Known(engine=report.get("engine")))


@pytest.mark.parametrize("report", REPORTS, ids=[report["source"].removeprefix("https://") for report in REPORTS])
def test_public_reports(report: dict[str, Any]) -> None:
    found = of_report(report, report["log"])
    if report["kind"] is None:
        assert found is None
        return
    assert found is not None
    assert found.kind == report["kind"]
    assert found.evidence
    # A terminal may have broken a line in two.
    assert all(line in report["log"].replace("\n", "") for line in found.evidence)
    for name in ("flag", "value", "direction"):
        if name in report:
            assert getattr(found.cure, name) == report[name]


def test_every_kind_is_judged_on_two_public_reports_or_more() -> None:
    counted = Counter(report["kind"] for report in REPORTS)
    assert set(diagnosis.KINDS) < set(counted)
    assert min(counted.values()) >= 2


@pytest.mark.parametrize("prefix", ["vllm-1  | ", "Dec 01 05:00:00 h100-sg-01 python[123]: ", "\x1b[0;36m", ""])
def test_what_a_logging_system_adds_changes_nothing(prefix: str) -> None:
    for report in REPORTS:
        log = "\n".join(prefix + line for line in report["log"].split("\n"))
        found = of_report(report, log)
        assert (found.kind if found else None) == report["kind"], report["source"]


def test_the_root_cause_counts_and_not_what_followed() -> None:
    log = (
        "(Worker_TP1 pid=12) ERROR 12-01 05:00:00 [core.py:1] Traceback (most recent call last):\n"
        '(Worker_TP0 pid=11) ERROR 12-01 05:00:00 [core.py:1]   File "x.py", line 1, in execute_model\n'
        '(Worker_TP1 pid=12) ERROR 12-01 05:00:00 [core.py:1]   File "gpu_model_runner.py", line 1, in capture_model\n'
        "(Worker_TP1 pid=12) ERROR 12-01 05:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 1.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 200.00 MiB is free.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "OSError: [Errno 98] Address already in use\n"
        "gpuready-engine@chat.0.service: Failed with result 'oom-kill'.\n"
    )
    found = diagnosis.of_log(log, Known("vllm", "0.19.1", {"fraction": 0.92}))
    assert found is not None
    # 0.80 GiB were missing and half a GiB is spared: 1.30 of 79.10 GiB are 0.0165 of 0.92.
    assert (found.kind, found.cure.direction, found.cure.value) == ("graph_capture", "lower", 0.9)


def test_an_earlier_start_does_not_speak_for_the_last_one() -> None:
    begin = "vLLM API server version 0.19.1\n"
    log = f"{begin}{NO_ROOM}\n{begin}[Errno 98] Address already in use\n"
    assert diagnosis.of_log(log) is None
    assert (diagnosis.other_cause(log) or "").startswith("the port is in use")


def test_a_killed_program_that_is_no_engine_is_not_the_cause_where_another_one_is_named() -> None:
    log = f"Out of memory: Killed process 77 (chrome) total-vm:1kB, anon-rss:1kB\n{NO_ROOM}"
    found = diagnosis.of_log(log)
    assert found is not None
    assert found.kind == "kv_cache"


def test_the_same_words_raise_the_share_at_start_and_lower_it_while_serving() -> None:
    starting = diagnosis.of_log(
        "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=78.50 GB\n"
        "[2026-01-01 00:00:00 TP0] Load weight end. type=X, avail mem=17.50 GB, mem usage=61.00 GB.\n"
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    )
    serving = diagnosis.of_log(
        "server_args=ServerArgs(mem_fraction_static=0.88, chunked_prefill_size=8192)\nThe server is fired up\n"
        'Traceback (most recent call last):\n  File "scheduler.py", line 1, in event_loop_overlap\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 1.50 GiB is free."
    )
    assert starting is not None
    assert serving is not None
    # 61 of 78.5 GiB are 0.777, and the KV cache wants something as well.
    assert (starting.kind, starting.cure.direction, starting.cure.value) == ("kv_cache", "raise", 0.83)
    # 0.5 GiB were missing and 0.5 are spared: 1 of 79.1 GiB is 0.0126 of 0.88.
    assert (serving.kind, serving.cure.direction, serving.cure.value) == ("activation", "lower", 0.86)
    assert starting.cure.flag == serving.cure.flag == "mem-fraction-static"


def test_weights_that_no_share_holds_want_more_gpus() -> None:
    log = (
        "[2026-01-01 00:00:00] Load weight begin. avail mem=23.00 GB\n"
        "[2026-01-01 00:00:00] Load weight end. avail mem=0.50 GB, mem usage=22.50 GB.\n"
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    )
    found = diagnosis.of_log(log, Known("sglang", "0.5.23", {"tp": 1}))
    assert found is not None
    assert (found.kind, found.cure.flag, found.cure.value) == ("weights", "tp-size", 2)


def test_flags_are_spelled_as_the_release_has_them() -> None:
    found = diagnosis.of_log(NO_ROOM, Known("tensorrt_llm"))
    assert found is not None
    assert found.cure.flag == "max_seq_len"
    offload = "ValueError: Not enough host memory available. Requesting 7.05 GB but only have 2.04 GB free."
    kept = diagnosis.of_log(offload)
    assert kept is not None
    assert kept.cure.flag == "hicache-size"


SERVING = (
    "The server is fired up\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.10 GiB of which 1.50 GiB is free."
)
PLAN = {
    "name": "chat",
    "engine": "vllm",
    "engine_version": "0.19.1",
    "settings": {"gpu_memory_utilization": 0.9, "max_model_len": 40960, "tensor_parallel_size": 1},
    "memory": {"total_gib": 79.1},
    "environment": [],
}


def test_the_plan_gives_the_share_that_the_log_does_not_tell() -> None:
    found = diagnosis.diagnose(SERVING, "", [], PLAN)
    assert found is not None
    # 0.5 GiB were missing and 0.5 are spared, of 79.1: 0.0126 less than 0.9.
    assert (found.kind, found.cure.flag, found.cure.value) == ("activation", "gpu-memory-utilization", 0.88)
    assert found.cure.declared("chat") == "gpuready_deployments, chat: flags: {gpu-memory-utilization: 0.88}"


def test_a_planned_share_is_not_raised_where_a_shorter_request_cures_it() -> None:
    log = f"Free memory on device (78.5/79.1 GiB) on startup. gpu_memory_utilization=0.6\n{NO_ROOM}"
    found = diagnosis.diagnose(log, "", [], PLAN)
    assert found is not None
    assert (found.cure.flag, found.cure.value) == ("max-model-len", 9344)


def test_a_leftover_process_is_named_with_its_pid() -> None:
    found = diagnosis.diagnose(SERVING, "", [Holder(0, 4711, 60.0, "VLLM::EngineCor")], PLAN)
    assert found is not None
    assert found.kind == "foreign_process"
    assert "GPU 0: process 4711 (VLLM::EngineCor) of no unit holds 60.00 GiB" in found.evidence
    assert found.cure.words() == "end process 4711, which no unit holds"


def test_a_deployment_beyond_its_part_of_a_shared_gpu_is_named() -> None:
    other = Holder(0, 9, 30.0, "python", "gpuready-engine@embed.0.service", "embed", 20.0)
    found = diagnosis.diagnose(SERVING, "", [other], PLAN)
    assert found is not None
    assert found.kind == "foreign_process"
    assert found.what == "deployment embed holds 30.00 GiB of the shared GPU; its part is 20.00"
    assert found.cure.words() == "restart deployment embed, or give it a larger part"


@pytest.mark.parametrize("held", [20.4, 0.3])
def test_a_deployment_within_its_part_is_no_cause(held: float) -> None:
    other = Holder(0, 9, held, "python", "gpuready-engine@embed.0.service", "embed", 20.0)
    found = diagnosis.diagnose(SERVING, "", [other], PLAN)
    assert found is not None
    assert found.kind == "activation"


def test_the_kernel_speaks_where_the_engine_could_not() -> None:
    kernel = "Out of memory: Killed process 9 (VLLM::Worker_TP) total-vm:1kB, anon-rss:209715200kB, file-rss:0kB"
    found = diagnosis.diagnose("INFO 12-01 05:00:00 [core.py:1] Loading", kernel, [], PLAN)
    assert found is not None
    assert found.kind == "host_ram"
    assert diagnosis.diagnose("", kernel.replace("VLLM::Worker_TP", "mysqld"), [], PLAN) is None


def test_expandable_segments_that_are_on_already_are_not_the_cure() -> None:
    log = (
        f"{SERVING} Of the allocated memory 70.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but "
        "unallocated."
    )
    plain = diagnosis.diagnose(log, "", [], PLAN)
    already = {"name": "PYTORCH_ALLOC_CONF", "value": "expandable_segments:True", "why": ""}
    after = diagnosis.diagnose(log, "", [], {**PLAN, "environment": [already]})
    assert plain is not None
    assert after is not None
    assert (plain.kind, plain.cure.flag, plain.cure.where) == ("fragmentation", "PYTORCH_ALLOC_CONF", "environment")
    assert "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, alike" in plain.cure.why
    assert plain.cure.declared("chat").endswith(
        "environment.j2 (docs/templates.md): PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert (after.cure.flag, after.cure.value) == ("gpu-memory-utilization", 0.88)
