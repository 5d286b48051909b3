"""What a role can do: thin shells around engines, stores and scorers, with no algorithm inside."""
