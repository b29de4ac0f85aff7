"""Other engines that model_speed.py can measure in turns with ours, each in a process and an environment of its own."""
