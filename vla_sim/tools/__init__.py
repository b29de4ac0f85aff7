"""One-off tools that prepare assets; nothing here is imported at run time."""
