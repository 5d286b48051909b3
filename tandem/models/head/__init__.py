"""From hidden states to log-probs: the projection on the vocabulary, whole, in chunks or split over ranks."""
