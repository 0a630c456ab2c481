"""Tokenisation into many shards, each made on its own."""
