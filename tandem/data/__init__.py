"""Data: files, rows, chat, and the seeded streams of prompts, examples and preferences."""
