"""The paper's tables, a module each; `python benchmarks/paper.py` runs and prints them."""
