"""Data that changes with the world, each entry with its source, and the one loader for it."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return one catalog page, e.g. `gpus`, as plain data.

    In the checkout a page is YAML, for people; in the zipapp it is JSON, because servers have no YAML reader.
    """
    page = resources.files(__package__).joinpath(f"{name}.json")
    if page.is_file():
        data = json.loads(page.read_text(encoding="utf-8"))
    else:
        import yaml

        data = yaml.safe_load(resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(data, dict)  # noqa: S101 - our own file
    return data


def lock_text(name: str) -> str:
    """Return the text of one hash-pinned lock, e.g. `vllm-0.32.0-cpu-py313` (controller only)."""
    return resources.files(__package__).joinpath("locks", f"{name}.txt").read_text(encoding="utf-8")


def has_lock(name: str) -> bool:
    """Say whether there is a lock of this name: some can be made only where a vendor's index is reached."""
    return resources.files(__package__).joinpath("locks", f"{name}.txt").is_file()


def names() -> list[str]:
    """Return the names of all pages (controller only)."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".yaml")
    )
