"""The ``dflash`` command: one thin module a subcommand, one flag vocabulary everywhere.

Text goes to stdout, figures and progress to stderr, colour only to a terminal.
"""
