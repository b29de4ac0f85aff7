"""What connects the core to engines, files and networks."""
