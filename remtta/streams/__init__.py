"""Streams: from sources to frames to batches.

`sources` opens a source as a `Stream` of `frames`, which `images`, `video` and `live` read; `prefetch` decodes them
ahead in threads, within `decoding_memory`; `batches` groups them; `fitness` finds those of which nothing is learned.
"""
