"""The loop over batches, and the files of a run."""
