"""What `paceline bench` runs."""
