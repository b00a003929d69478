"""One file per container format: how a file becomes segments."""
