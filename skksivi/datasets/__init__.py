"""Data sets, as numpy arrays."""

from skksivi.datasets._waveform import load_waveform, load_waveform_posterior, make_waveform

__all__ = ["load_waveform", "load_waveform_posterior", "make_waveform"]
