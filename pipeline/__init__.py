"""The jobs: archive, restore, verify and what belongs to them."""
