"""What the files that a config names say, read without loading a model or a data set."""
