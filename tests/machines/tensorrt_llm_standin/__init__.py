"""A stand-in of TensorRT-LLM 1.0.0 for tests: its `trtllm-serve` takes and refuses what the real one does, no more.

Tests build it into a wheel, which they put into a catalog of their own; nothing of the product knows it. It starts on a
simulated machine alone. What it was made after is said in NOTICE; none of that code is in it.
"""
