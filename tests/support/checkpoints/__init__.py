"""States to save, and classes of their values."""
