"""Where roles run: in this process and its children, or in actors of Ray."""
