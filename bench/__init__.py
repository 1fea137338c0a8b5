"""Measurements, one question per file: `python -m bench` lists them. Run from a clone; not installed."""
