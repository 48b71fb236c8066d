"""One HTML page on runs and evaluations, made from their files."""
