"""Functions that three families of operators or more share."""
