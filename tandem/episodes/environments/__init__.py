"""Episodes that environments of other packages play."""
