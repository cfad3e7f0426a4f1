"""Estimators of the kernel Stein discrepancy, and the terms beside them."""
