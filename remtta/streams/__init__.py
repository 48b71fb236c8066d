"""Streams: from sources to frames to batches."""
