"""Makes the stand-in's wheel, its lock, and a copy of the checkout whose catalog names it; not in the wheel."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import yaml
from sim.machine.common import CHECKOUT

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.name
VERSION = "1.0.0"
LOCK = f"tensorrt-llm-{VERSION}-standin-py{{py}}"
_EPOCH = (2025, 1, 1, 0, 0, 0)
"""The time of every file in the wheel, so that it has the same hash whenever it is made."""
ENTRY: dict[str, Any] = {
    "version": VERSION,
    "distribution": PACKAGE.replace("_", "-"),
    "lock": LOCK,
    "pythons": ["3.11"],
    "apt": ["{python}-venv"],
    "smoke": ["yaml", f"{PACKAGE}.server_standin"],
    "settings": {},
    "environment": {},
    "download_gib": 1,
    "install_gib": 1,
    "index": [],
    "standin": None,
    "resolve": None,
    "source": f"A stand-in made by {Path(__file__).name}: no model is computed, its command line is TensorRT-LLM's.",
}
"""The stand-in in a test's catalog; Debian 12's Python alone, because the lock's other package is taken for it."""


def build(folder: Path) -> Path:
    """Write the wheel into a folder; return its path."""
    wheel = folder / f"{PACKAGE}-{VERSION}-py3-none-any.whl"
    info = f"{PACKAGE}-{VERSION}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\nSummary: a stand-in for tests\n"
    files = {
        **{f"{PACKAGE}/{file.name}": file.read_text(encoding="utf-8") for file in sorted(HERE.glob("*_standin.py"))},
        f"{PACKAGE}/__init__.py": (HERE / "__init__.py").read_text(encoding="utf-8"),
        f"{info}/NOTICE": (HERE / "NOTICE").read_text(encoding="utf-8"),
        f"{info}/METADATA": f"{about}Requires-Dist: PyYAML\n",
        f"{info}/WHEEL": tags,
        f"{info}/entry_points.txt": f"[console_scripts]\ntrtllm-serve = {PACKAGE}.server_standin:main\n",
    }
    lines = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def lock_text(wheel: Path) -> str:
    """Return the lock of the stand-in: its wheel by hash, and the YAML reader as another engine's lock has it."""
    other = (CHECKOUT / "src/gpuready/catalog/locks/vllm-0.32.0-cpu-py311.txt").read_text(encoding="utf-8")
    found = re.search(r"^pyyaml==.*\n(?:    .*\n)*", other, re.MULTILINE)
    assert found, "the lock of vLLM's CPU build names PyYAML"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"# A test's lock.\n{ENTRY['distribution']}=={VERSION} \\\n    --hash=sha256:{digest}\n{found[0]}"


def checkout(folder: Path, wheel: Path) -> Path:
    """Copy this checkout into a folder, with the stand-in as the engine tensorrt_llm of stack cpu; return the copy.

    It has an environment of its own, as every checkout: playbooks are refused in another one's.
    """
    copy = folder / "checkout"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = CHECKOUT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    stacks = copy / "src/gpuready/catalog/stacks.yaml"
    told = yaml.safe_load(stacks.read_text(encoding="utf-8"))
    told["stacks"]["cpu"]["engines"]["tensorrt_llm"] = ENTRY
    stacks.write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
    lock = copy / f"src/gpuready/catalog/locks/{LOCK.format(py='311')}.txt"
    lock.write_text(lock_text(wheel), encoding="utf-8")
    subprocess.run([copy / "scripts/setup"], check=True)
    return copy
