"""What happens to a batch: predict, center, judge, combine, learn."""
