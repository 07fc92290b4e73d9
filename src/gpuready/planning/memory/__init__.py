"""Where the memory of one GPU goes when an engine serves a model on it, engine by engine and version by version."""
