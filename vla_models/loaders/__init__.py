"""Readers of foreign checkpoints."""
