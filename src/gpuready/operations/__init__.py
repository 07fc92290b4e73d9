"""What spans rooms: settings of the host, releases, restarts."""
