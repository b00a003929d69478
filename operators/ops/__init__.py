"""One file per operator: both directions beside each other."""
