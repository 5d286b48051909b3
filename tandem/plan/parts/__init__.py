"""What a config comes to for each part of a run: decided once here, asked by the checks and at run time."""
