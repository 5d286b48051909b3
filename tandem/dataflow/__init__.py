"""Data: sources of prompts and examples, the ledger, the gate and the stores that samples pass through."""
