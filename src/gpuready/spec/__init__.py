"""What an operator writes: the one definition of every `gpuready_*` variable, its schema and its docs."""

from gpuready.spec.check import check_declaration
from gpuready.spec.model import HostSpec

__all__ = ["HostSpec", "check_declaration"]
