"""The pure part of the edge: numpy and the standard library, deterministic, no clock, no I/O but shared memory."""
