"""The cloud side: observations in, context tokens out, at 10 Hz per robot."""
