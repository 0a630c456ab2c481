"""Files of a checkpoint byte for byte."""
