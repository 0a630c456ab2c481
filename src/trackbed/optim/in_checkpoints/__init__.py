"""States of models and optimizers as they are stored in checkpoints."""
