"""Calls and payloads of Ray actors, for whoever lives on Ray."""
