"""The built-in scorers."""
