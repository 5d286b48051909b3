"""Who does what, when: one loop a file."""
