"""Work in processes of this machine or of a cluster, and how it is stopped."""
