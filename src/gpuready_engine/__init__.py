"""Programs that run inside an engine's own environment: Python 3.10, and of packages only what the engine brings.

gpuready.pyz carries them as data; `gpuready.serving.arguments` hands them to the engine's Python on standard input.
"""
