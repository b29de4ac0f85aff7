"""Stages 4 and 7 for robots: prefill of an observation and projection to context tokens."""
