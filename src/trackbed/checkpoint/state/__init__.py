"""State dictionaries: entries for parts of tensors and objects, and the plain values beside them."""
