"""Scores of targets: what a function may be, and products with its Jacobian."""
