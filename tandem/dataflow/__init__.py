"""The ledger, the gate and the stores that samples pass through."""
