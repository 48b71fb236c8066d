"""Work in processes or on a Ray cluster, for the parts; the core runs in one process."""
