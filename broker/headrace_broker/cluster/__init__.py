"""The broker in its cluster: its registration, and a store that the cluster still expects."""
