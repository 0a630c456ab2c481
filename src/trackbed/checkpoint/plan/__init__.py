"""Which rank writes and reads what: pure, and the same on every rank, but for the exchange itself."""
