"""Linear layers on packed weights."""
