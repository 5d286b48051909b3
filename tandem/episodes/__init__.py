"""Episodes: answers of several turns, with tools or an environment between them."""
