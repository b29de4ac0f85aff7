"""Stages 4 and 6 for chat: one worker's engine and the model behind it."""
