"""Run tasks in processes of this machine or of a cluster, and stop them."""
