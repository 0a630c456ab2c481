"""Reading and writing of the files of a checkpoint."""
