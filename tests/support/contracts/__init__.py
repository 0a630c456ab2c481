"""What every implementation of a protocol must do."""
