"""SQL92 filters: a parser, and evaluators of single records and of blocks of them.

Imported only where there is such a filter. Source: docs/protocol.md "SQL92 filters".
"""
