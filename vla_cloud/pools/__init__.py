"""Processes of the serving engine: workers, their supervisor, the messages between them and the gateway."""
