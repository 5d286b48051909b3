"""Images in a language model: read as patches, and placed among its tokens."""
