"""Training: the engine behind ``TrainEngine``, objectives, schedules and checkpoints."""
