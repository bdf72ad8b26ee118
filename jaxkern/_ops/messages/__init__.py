"""Messages on graphs."""
