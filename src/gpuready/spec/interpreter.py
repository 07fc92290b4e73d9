"""Which Python runs our programs on a server."""

from __future__ import annotations

DEFAULT = "/usr/bin/python3"
AUTOMATIC = ("auto", "auto_silent", "auto_legacy", "auto_legacy_silent")
"""Ansible's words for having a module find one; ours are no modules, and start without asking first."""


def interpreter(declared: str | None, default: str = DEFAULT) -> str:
    """Return the path of the interpreter that `ansible_python_interpreter` declares."""
    return declared if declared and declared not in AUTOMATIC else default
