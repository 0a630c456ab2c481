"""Plain values of a state: how they are pickled, what is read back, and how much of a storage is written."""
