"""What `python -m jaxkern` checks and times."""
