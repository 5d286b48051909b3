"""Which keys of a config are read only in some configurations: the form of these tables, and one for each command."""
