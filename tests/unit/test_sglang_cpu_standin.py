"""SGLang's stand-in operator turns what it shall, and is found on a simulated machine alone.

That it does so on tensors is asked of the engine's own torch by the machine tests.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim.engines.sglang_cpu_standin.vllm.rotary_embedding_standin import halves, rotated
from sim.machine import image
from tests.rotary_reference import HEAD, angles, turned
from tests.unit.standin import CHECKOUT
from tests.unit.test_planning import FACTS, deployment, plan, spec

from gpuready.outcome import Refusal

FOLDER = CHECKOUT / "sim/engines/sglang_cpu_standin"


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary", [HEAD, 4], ids=["whole head", "half of it"])
@pytest.mark.parametrize("position", [0, 1, 777])
def test_pairs_are_turned_as_complex_numbers_are(position: int, rotary: int, is_neox: bool) -> None:
    chance = random.Random(position)  # noqa: S311 - the same numbers at every run
    numbers = [chance.uniform(-2, 2) for _ in range(HEAD)]
    first, second = halves(rotary, is_neox)
    pairs = zip(numbers[first], numbers[second], *angles(position, rotary), strict=True)
    found = list(numbers)
    found[first], found[second] = map(list, zip(*(rotated(*pair) for pair in pairs), strict=True))
    assert found == pytest.approx(turned(numbers, position, rotary, is_neox))
    assert found[rotary:] == numbers[rotary:]


def found_as_sglang_does(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from vllm._custom_ops import rotary_embedding; print(rotary_embedding.__name__)"
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_is_not_found_on_a_machine_without_the_marker() -> None:
    assert not Path("/etc/gpuready-simulated-machine").exists(), "this test asks a real machine"
    done = found_as_sglang_does(FOLDER)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: SGLang's stand-in operator is for simulated machines alone: "
        "/etc/gpuready-simulated-machine is not there"
    )


def test_it_is_found_on_a_simulated_machine(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    for file in FOLDER.rglob("*.py"):
        copy = tmp_path / file.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8")
        copy.write_text(text.replace("/etc/gpuready-simulated-machine", str(marker)), encoding="utf-8")
    done = found_as_sglang_does(tmp_path)
    assert (done.returncode, done.stdout) == (0, "rotary_embedding\n"), done.stderr


def planned(python: str = "3.11") -> dict[str, Any]:
    """Return the plan of a Debian server whose SGLang is the stand-in."""
    declared = spec(deployment(engine="sglang"), gpuready_stack="cpu", gpuready_simulated=True)
    return plan(declared, facts={**FACTS, "python": python})


def test_the_stack_gives_sglang_its_stand_in_and_backends_that_run_on_a_cpu() -> None:
    made = planned()
    assert [(one["engine"], one["standin"]) for one in made["engines"]] == [("sglang", "sglang_cpu_standin")]
    (one,) = made["deployments"]
    options = {option["name"]: option["value"] for group in one["options"].values() for option in group}
    own = {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
    assert options.items() >= {**own, "disable-overlap-schedule": True, "tp-size": 1}.items()
    variables = {variable["name"]: variable["value"] for variable in one["environment"]}
    assert variables["PYTHONPATH"] == f"/{image.STANDINS}/{FOLDER.name}"


def test_its_kv_cache_is_its_own_small_one_in_tokens_and_the_plan_is_the_cards() -> None:
    (one,) = planned()["deployments"]
    memory = {option["name"]: option["value"] for option in one["options"]["memory"]}
    # 64 MiB of 128 KiB a token; a share of the card's memory would be one of this server's.
    assert memory == {"max-total-tokens": 512}
    assert one["stand_in"] == {"kv_bytes": 64 * 2**20, "bytes_per_token": 131072}
    assert one["memory"]["kv_tokens"]["value"] > 300_000


def test_on_debian_13_sglang_is_refused_with_the_remedies() -> None:
    with pytest.raises(Refusal) as caught:
        planned("3.13")
    assert str(caught.value) == (
        "host h1, deployment chat: sglang 0.5.23 has no lock for the server's Python 3.13: it runs on Python 3.11; use "
        "Debian 12 (3.11), or install a Python 3.11 on the server and name it: "
        "engines_pythons: {sglang: /opt/python3.11/bin/python3}."
    )
