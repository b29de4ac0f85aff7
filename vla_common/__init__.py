"""Shared foundation: wire format, topics, configuration, clocks, metrics, manifests.

Standard library and numpy only, plus rosbags for CDR (messages.py) and zenoh (zenoh_session.py, nowhere else).
"""
