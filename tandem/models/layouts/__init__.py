"""How samples lie in a forward: packed documents, rows of one document each, a growing cache of keys and values."""
