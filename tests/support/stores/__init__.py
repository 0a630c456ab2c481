"""Starts object stores."""
