"""Out-of-memory diagnosis on lines that the engines' sources write, and on what is no out-of-memory."""

from __future__ import annotations

import pytest

from gpuready.memory import diagnosis

NO_ROOM = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (4.38 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum "
    "model length is 9344. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"
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
