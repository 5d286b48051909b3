"""The Ray runtime: the cluster, its devices, and roles as actors."""
