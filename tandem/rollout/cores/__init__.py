"""Engines of other packages, each behind the few calls that a core has."""
