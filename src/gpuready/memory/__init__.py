"""GPU and host memory of running engines: which kind of out-of-memory it was, and what cures it."""
