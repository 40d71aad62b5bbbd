"""What broker and nameserver are daemons with: process, logs, services, network."""
