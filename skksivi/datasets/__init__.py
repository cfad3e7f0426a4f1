"""Data sets, as numpy arrays."""

from skksivi.datasets._uci import (
    fetch_boston,
    fetch_concrete,
    fetch_power,
    fetch_protein,
    fetch_waveform,
    fetch_wine_red,
    fetch_yacht,
    load_waveform,
    load_waveform_posterior,
    make_waveform,
    uci_splits,
)

__all__ = [
    "fetch_boston", "fetch_concrete", "fetch_power", "fetch_protein", "fetch_waveform", "fetch_wine_red",
    "fetch_yacht", "load_waveform", "load_waveform_posterior", "make_waveform", "uci_splits",
]  # fmt: skip
