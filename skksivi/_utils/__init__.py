"""What every layer uses: arrays, checks and warnings, lazy imports, files, statistics of draws; and the version."""

__version__ = "0.1.0"

#: Where the pages of `make doc` are published, for the links of estimators in notebooks.
DOCUMENTATION = "https://skksivi.readthedocs.io/en/stable"
