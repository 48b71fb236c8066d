"""The one loop over batches, and what a run keeps."""
