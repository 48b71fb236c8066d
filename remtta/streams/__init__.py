"""Sources to frames to batches."""
