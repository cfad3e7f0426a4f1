"""Targets of models in other libraries."""
