"""Models, their wrappers and steps."""
