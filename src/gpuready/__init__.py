"""gpuready: takes a bare GPU server, makes it serve language models, and keeps it that way."""

__version__ = "0.1.0"
