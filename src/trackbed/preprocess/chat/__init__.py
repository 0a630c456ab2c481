"""Conversations as documents: records, chat templates, and the tokens that are trained on."""
