"""What a server's hardware is: its PCI devices, its GPUs through NVML, and the host around them.

This room only reads; it is the one room that imports pynvml. A value that could not be read is None, never 0.
"""
