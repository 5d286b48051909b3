"""Every sample of a run, kept in parquet parts that whoever looks at it reads."""
