"""Stage 2, the front doors for chat: one layer without a transport, gRPC and HTTP on it."""
