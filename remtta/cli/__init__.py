"""The command line: parse, call the library once, report. In the core, only this folder imports typer."""
