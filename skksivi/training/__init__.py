"""The optimisation loop, what is done between its iterations, and checkpoints."""
