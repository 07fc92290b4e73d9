"""The command line: one file per noun, parsing and printing only."""
