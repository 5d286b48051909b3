"""An OpenAI-compatible address: what its clients ask becomes questions to a policy."""
