"""Classifiers: their weights, labels and preprocessing."""
