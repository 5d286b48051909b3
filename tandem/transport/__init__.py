"""Weights broadcast between processes: buckets, explicit process groups, and the two ends of one transfer."""
