"""Export adapted models to other formats, each verified with the target library before it is kept."""
