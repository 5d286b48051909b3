"""From a config to its plan, and every contradiction in it. Pure: no torch, no Ray, nothing that runs."""
