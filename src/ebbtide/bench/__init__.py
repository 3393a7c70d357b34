"""Measurements: ratios taken interleaved in one run, medians of several."""
