"""The gRPC interface, vla_chat.proto, and the modules that tools/make_proto.py generates from it."""
