"""The command line: parse, call the library once, report. The only folder of the core that imports typer."""
