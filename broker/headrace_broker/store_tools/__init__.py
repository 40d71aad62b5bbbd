"""Offline tools that check, repair, print, measure and copy a store directory."""
