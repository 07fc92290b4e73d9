"""Models on a server's disk: judged, brought from a hub, and never taken for whole when they are not."""

from gpuready.serving.models.bring import Hubs, bring, facts
from gpuready.serving.models.files import (
    ADAPTER,
    ENGINE_USER,
    INDEX,
    STORE,
    check,
    read_adapter,
    read_model,
    unreadable_for,
)
from gpuready.serving.models.generated import is_whole, place, revision, revision_of
from gpuready.serving.models.shards import BadModel, read_shard
from gpuready.serving.models.store import MANIFEST, verify

__all__ = [
    "ADAPTER",
    "ENGINE_USER",
    "INDEX",
    "MANIFEST",
    "STORE",
    "BadModel",
    "Hubs",
    "bring",
    "check",
    "facts",
    "is_whole",
    "place",
    "read_adapter",
    "read_model",
    "read_shard",
    "revision",
    "revision_of",
    "unreadable_for",
    "verify",
]
