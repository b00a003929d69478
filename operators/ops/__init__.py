"""One module per operator, both directions beside each other; the docstring is its specification."""
