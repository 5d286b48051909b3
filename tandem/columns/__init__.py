"""The batch: declared columns, ragged storage and DataProto."""
