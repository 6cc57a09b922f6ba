"""What three families or more share."""
