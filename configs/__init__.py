"""Settings: what decides bytes (recipe) and what cannot (run)."""
