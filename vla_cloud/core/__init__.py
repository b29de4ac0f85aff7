"""Decisions of the cloud without torch, Zenoh or a clock of their own."""
