"""The data plane over Ray: a controller with the ledger, storage units with the tensors."""
