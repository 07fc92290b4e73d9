"""What runs inside an engine's own Python: standard library only."""
