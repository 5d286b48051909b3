"""From a plan to live roles."""
