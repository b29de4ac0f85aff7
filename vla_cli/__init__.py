"""The ``vla`` command."""
