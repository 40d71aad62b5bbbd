"""Static topics: this broker's part of their mappings, and the changes to it."""
