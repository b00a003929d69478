"""One file per encoding of a literal."""
