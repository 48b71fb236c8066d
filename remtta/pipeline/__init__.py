"""The pipeline of a batch: predict, center, judge, combine, learn."""
