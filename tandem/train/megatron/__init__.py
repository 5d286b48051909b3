"""The training engine on Megatron-core: its transformer and tensor parallelism, behind the same protocol."""
