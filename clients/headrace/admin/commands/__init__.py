"""Subcommands of ``headrace``, one module each."""
