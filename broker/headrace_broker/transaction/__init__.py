"""Transactions: half messages wait until their producer commits them or rolls them back."""
