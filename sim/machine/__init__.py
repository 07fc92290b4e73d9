"""Builds simulated GPU servers: real, booted Debian machines under systemd-nspawn.

Standard library only, so that it runs on a fresh machine before any environment exists:
`./scripts/gpusim --help` from the top of the checkout.
"""
