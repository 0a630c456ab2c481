"""Blends of datasets, and the orders in which they draw from them."""
