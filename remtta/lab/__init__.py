"""Evaluation, corrupted images, benchmark, doctor, report and demo."""
