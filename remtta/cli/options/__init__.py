"""The options that commands share, in groups by theme, each with what turns it into what the library takes."""
