"""Engines, models, releases and readiness on the server."""
