"""The command of the simulation, `./scripts/gpusim`: its verbs, its words, the table of faults.

Standard library only, except where a description of hardware is compiled.
"""
