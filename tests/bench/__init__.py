"""Measurements: sizes and speeds beside other compressors, file to file, and memory. ``python -m tests.bench``."""
