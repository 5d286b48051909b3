"""The stages of a step: one object each, in the one table that the plan, the loops and the measurement read.

Importing this package imports no torch: a stage says what it needs and gives, and imports what it runs in ``build``.
"""
