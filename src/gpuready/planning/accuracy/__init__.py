"""How good the arithmetic is: recorded runs, the errors against them, and what engines report after their start."""
