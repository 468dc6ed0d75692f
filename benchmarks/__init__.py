"""Step time and memory against non-private training and against the peers."""
