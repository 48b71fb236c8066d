"""Adapted models as other programs take them, each checked in that program before anything is left on the disk."""
