"""Where it runs: the plan (pure), the runtimes, and the live handles built from a plan."""
