"""Pairs in object stores."""
