"""The tier in a running broker: uploads in the background, and reads in front of the local log."""
