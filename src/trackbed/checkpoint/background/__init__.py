"""Saves in the background: a copy of the state, and a thread that writes it while training goes on."""
