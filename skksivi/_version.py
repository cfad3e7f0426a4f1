"""The version and the address of the documentation, in one place."""

__version__ = "0.1.0"

#: Where the pages of `make doc` are published, for the links of estimators in notebooks.
DOCUMENTATION = "https://skksivi.readthedocs.io/en/stable"
