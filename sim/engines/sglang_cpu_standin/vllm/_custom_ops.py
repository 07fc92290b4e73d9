"""Where SGLang looks for the operator. It refuses to be found on a machine that the machine builder did not make."""

from __future__ import annotations

from pathlib import Path

from .rotary_embedding_standin import rotary_embedding

__all__ = ["rotary_embedding"]

MARKER = Path("/etc/gpuready-simulated-machine")

if not MARKER.exists():
    raise ImportError(f"SGLang's stand-in operator is for simulated machines alone: {MARKER} is not there")
