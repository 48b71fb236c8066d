"""Who looks on at a run: files, metrics, a broker, a video."""
