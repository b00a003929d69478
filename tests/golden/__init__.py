"""Records as they were written: one file per format version, one line per operator and encoding and case."""
