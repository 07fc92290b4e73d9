from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from gpuready import catalog
from gpuready.outcome import Refusal
from gpuready.planning.engines import lock_name
from gpuready.serving import locks

STACKS = catalog.load("stacks")["stacks"]
NAMED = [
    (stack, engine, python, lock_name(data, python))
    for stack, entry in STACKS.items()
    for engine, data in entry["engines"].items()
    for python in data["pythons"]
]
# Some can be made only where a vendor's own index is reached.
ENGINE_LOCKS = [one for one in NAMED if catalog.has_lock(one[3])]
ALL_LOCKS = [name for *_, name in ENGINE_LOCKS] + [tool["lock"] for tool in catalog.load("stacks")["tools"].values()]
CPU_WHEEL = {
    "3.11": "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "3.13": "sha256:3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
}
# torch-2.13.0-cp311 and -cp313, manylinux_2_28_x86_64, as the default index lists them.
PUBLISHED_FILES = 24


@pytest.mark.parametrize("name", ALL_LOCKS)
def test_a_lock_pins_everything_by_hash_and_names_no_address(name: str) -> None:
    text = catalog.lock_text(name)
    lock = locks.parse(name, text)
    assert all(one.hashes for one in lock.requirements)
    assert lock.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert "://" not in text
    assert not re.search(r"(?m)^\s*(-i|--index|--extra|--find|-e|@)", text)
    assert len({one.name for one in lock.requirements}) == len(lock.requirements)


@pytest.mark.parametrize(("stack", "engine", "python", "name"), ENGINE_LOCKS)
def test_an_engine_lock_is_of_the_engine_and_the_python_that_its_name_says(
    stack: str, engine: str, python: str, name: str
) -> None:
    data = STACKS[stack]["engines"][engine]
    lock = locks.parse(name, catalog.lock_text(name))
    pinned = {one.name: one.version for one in lock.requirements}
    assert pinned[data["distribution"]].partition("+")[0] == data["version"]
    assert lock.python == python
    assert {"torch", "transformers", "fastapi", "numpy"} <= set(pinned)


def test_no_lock_lies_about_that_the_catalog_does_not_name() -> None:
    folder = Path(catalog.__file__).parent / "locks"
    assert {path.stem for path in folder.glob("*.txt")} == set(ALL_LOCKS)


@pytest.mark.parametrize(
    ("stack", "engine", "name"), [(one[0], one[1], one[3]) for one in NAMED if one not in ENGINE_LOCKS]
)
def test_only_what_a_vendors_own_index_holds_has_no_lock(stack: str, engine: str, name: str) -> None:
    assert STACKS[stack]["engines"][engine]["index"], name


@pytest.mark.parametrize("python", CPU_WHEEL)
def test_the_cpu_lock_names_the_hashes_of_both_torches(python: str) -> None:
    name = f"vllm-0.32.0-cpu-py{python.replace('.', '')}"
    torch = next(one for one in locks.parse(name, catalog.lock_text(name)).requirements if one.name == "torch")
    assert CPU_WHEEL[python] in torch.hashes
    assert len(torch.hashes) > PUBLISHED_FILES / 2
    assert len(set(torch.hashes)) == len(torch.hashes)


def test_what_only_the_cuda_torch_needs_can_be_left_out() -> None:
    lock = locks.parse("vllm-0.32.0-cpu-py311", catalog.lock_text("vllm-0.32.0-cpu-py311"))
    text = lock.text([locks.CUDA_LIBRARIES], {"torch": "2.13.0+cpu"})
    assert "torch===2.13.0+cpu" in text
    assert "nvidia-" not in text
    assert text.count("===") == lock.count([locks.CUDA_LIBRARIES]) < lock.count()
    assert "nvidia-cublas===" in lock.text()


SMALL = "one==1.0 \\\n    --hash=sha256:{0}\ntwo==2.0 --hash=sha256:{1}\n"


def small(*digests: str) -> str:
    return SMALL.format(*(digests or ("a" * 64, "b" * 64)))


def test_a_lock_with_a_bare_requirement_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"Lock x names three without a hash"):
        locks.parse("x", small() + "three==3\n")
    with pytest.raises(Refusal, match=r"Lock x, line 1, is not a pinned requirement: four>=4"):
        locks.parse("x", "four>=4 --hash=sha256:" + "a" * 64)
    with pytest.raises(Refusal, match="Lock x is empty"):
        locks.parse("x", "# nothing\n")


def test_wheels_are_chosen_by_hash_and_by_what_they_fit(tmp_path: Path) -> None:
    good = tmp_path / "one-1.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    good.write_bytes(b"good")
    digest = hashlib.sha256(b"good").hexdigest()
    (tmp_path / "one-1.0-cp312-cp312-manylinux_2_28_x86_64.whl").write_bytes(b"good")
    (tmp_path / "one-1.0-cp311-cp311-win_amd64.whl").write_bytes(b"good")
    (tmp_path / "two-2.0-py3-none-any.whl").write_bytes(b"not what the lock names")
    (tmp_path / "other-1.0-py3-none-any.whl").write_bytes(b"good")
    lock = locks.parse("e-1-py311", small(digest, digest))
    assert locks.wheels_in([tmp_path, tmp_path / "absent"], lock) == [good]
    assert locks.wheels_in([tmp_path], locks.parse("e-1-py311", small())) == []


@pytest.mark.parametrize(
    ("file", "python", "fits"),
    [
        ("a-1-py3-none-any.whl", "3.13", True),
        ("a-1-cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "3.13", True),
        ("a-1-cp313-cp313t-manylinux_2_17_x86_64.whl", "3.11", False),
        ("a-1-cp313-cp313-manylinux_2_17_aarch64.whl", "3.13", False),
        ("a_b-1%2Bcpu-cp313-cp313-linux_x86_64.whl", "3.13", True),
    ],
)
def test_a_wheel_fits_a_python_or_not(file: str, python: str, fits: bool) -> None:
    wheel = locks.wheel_of(Path(file))
    assert wheel is not None
    assert wheel.fits(python) is fits


def test_a_folder_of_wheels_may_hold_what_is_no_file(tmp_path: Path) -> None:
    """A link that leads nowhere, or a wheel that somebody unpacked in place."""
    content = b"wheel"
    lock = locks.parse("x-py312", f"a==1 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n")
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(content)
    (tmp_path / "a-1-1-py3-none-any.whl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a-1-2-py3-none-any.whl").mkdir()
    assert locks.wheels_in([tmp_path], lock) == [tmp_path / "a-1-py3-none-any.whl"]
