"""Benches run on the same booted machines as tests/machines."""

from tests.machines.conftest import finished_image, machines, sim

__all__ = ["finished_image", "machines", "sim"]
