"""One page on runs and evaluations, from the files they left."""
