"""The optimisation loop, and what is done between its iterations."""
