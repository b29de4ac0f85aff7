"""The robot side: chunks of actions in, one safe joint command per 10 ms out."""
