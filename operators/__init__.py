"""The language and its decoder: restoring needs only this package and a store."""
